// The connection: envelopes, requests with one answer, and compare-and-set on the operations stream.
import { fileURLToPath } from "node:url";
import { connect, createInbox, headers } from "nats";
import protobuf from "protobufjs";

const proto = fileURLToPath(new URL("../../../proto/", import.meta.url));
export const root = new protobuf.Root();
root.resolvePath = (_, file) => (file.startsWith("google/") ? file : proto + file);
const Envelope = root.loadSync("machinebus/driver/v1/envelope.proto").lookupType("machinebus.driver.v1.Envelope");
export const Code = root.lookupEnum("machinebus.driver.v1.Code").values;
export const OperationNumbers = root.lookupEnum("machinebus.driver.v1.Operation").values;

export const encode = (env) => Envelope.encode(Envelope.fromObject(env)).finish();
export const decode = (data) => Envelope.decode(data);

// JSON is for people who try a read by hand [ENV-1] [ENV-2]; protobufjs supports the mapping except for times, of which a read has one.
export const inJSON = (m) => !!m.headers?.get("Content-Type").startsWith("application/json");
const times = (key, v) => (key === "timeout" ? { seconds: Math.ceil(parseFloat(v)) } : key === "acceptBy" ? undefined : v);
export const decodeJSON = (text) => Envelope.fromObject(JSON.parse(text, times));
const wait = (key, v) => (key === "retryAfter" ? `${+v.seconds + (v.nanos ?? 0) / 1e9}s` : v);
export const encodeJSON = (env) => Buffer.from(JSON.stringify(Envelope.toObject(Envelope.fromObject(env), { enums: String, longs: String, bytes: String }), wait));
export const headersOfJSON = headers();
headersOfJSON.set("Content-Type", "application/json");
export const open = (type, data) => root.lookupType("machinebus.driver.v1." + type).decode(data);
export const bytes = (type, message) => { const t = root.lookupType("machinebus.driver.v1." + type); return t.encode(t.fromObject(message)).finish(); };

// timestamp and millis are Timestamps and Durations, from and to milliseconds.
export const timestamp = (ms) => ({ seconds: Math.floor(ms / 1000), nanos: Math.floor(ms % 1000) * 1e6 });
export const millis = (t) => Number(t.seconds) * 1000 + t.nanos / 1e6;

export class Wire {
  static async connect(servers, provider) {
    const wire = new Wire();
    wire.inboxPrefix = `_INBOX_driver.${provider}`;
    wire.nc = await connect({ servers, name: `driver ${provider}`, inboxPrefix: wire.inboxPrefix, maxReconnectAttempts: -1, waitOnFirstConnect: true });
    wire.up = true;
    wire.onUp = () => {};
    (async () => {
      for await (const s of wire.nc.status()) {
        if (s.type === "disconnect") wire.up = false;
        if (s.type === "reconnect") { wire.up = true; wire.onUp(); }
      }
    })();
    return wire;
  }

  // publish sends at once or never: late messages do harm. It throws if the message is too large for the server.
  publish(subject, data, options) {
    if (!this.up) return false;
    this.nc.publish(subject, data, options);
    return true;
  }

  // put writes a record by compare-and-set. It resolves to {seq}, to {conflict, there}, or to {none} if the outcome is unknown.
  put(subject, env, expected) {
    const h = headers();
    h.set("Nats-Expected-Last-Subject-Sequence", String(expected));
    return new Promise((resolve) => {
      const inbox = createInbox(this.inboxPrefix);
      const sub = this.nc.subscribe(inbox, { max: 1, timeout: 1000, callback: (error, m) => {
        if (error || m.data.length === 0) return resolve({ none: error ? "no answer" : "no stream" });
        const ack = JSON.parse(m.string());
        if (ack.seq) return resolve({ seq: BigInt(ack.seq) });
        const there = /wrong last sequence: (\d+)/.exec(ack.error?.description ?? "");
        const conflict = ack.error?.err_code === 10071 || ack.error?.err_code === 10164;
        resolve(conflict ? { conflict, there: there && BigInt(there[1]) } : { none: ack.error?.description });
      } });
      const unsent = (why) => { sub.unsubscribe(); resolve({ none: why }); };
      try { if (!this.publish(subject, encode(env), { reply: inbox, headers: h })) unsent("not connected"); } catch (e) { unsent(e.message); }
    });
  }
}

// A plain driver according to PROTOCOL.md: one request, one answer. Calls of the cloud are in cloud.mjs. PROTOCOL.md,
// section 1, lists what a plain driver lacks; driver-nodejs-full has it.
import { fileURLToPath } from "node:url";
import { connect, headers } from "nats";
import protobuf from "protobufjs";
import { Failure, find, list, make, remove } from "./cloud.mjs";

const { NATS_URL = "nats://127.0.0.1:4222", CLUSTER = "default", PROVIDER = "nodejs" } = process.env;
const root = new protobuf.Root(), proto = fileURLToPath(new URL("../../../proto/", import.meta.url));
root.resolvePath = (_, file) => (file.startsWith("google/") ? file : proto + file);
const Envelope = root.loadSync("machinebus/driver/v1/envelope.proto").lookupType("machinebus.driver.v1.Envelope");
const codeOf = (number) => root.lookupEnum("machinebus.driver.v1.Code").valuesById[number].slice("CODE_".length);

// Protobuf, or JSON for people who try a read by hand [ENV-2]; protobufjs supports the mapping except for times.
const inJSON = (m) => m.headers?.get("Content-Type").startsWith("application/json");
const ofJSON = { headers: headers() };
ofJSON.headers.set("Content-Type", "application/json");
const seconds = { timeout: (v) => Math.ceil(parseFloat(v)), acceptBy: (v) => Date.parse(v) / 1000 };
const times = (key, v) => (Object.hasOwn(seconds, key) ? { seconds: seconds[key](v) } : v);
const wait = (key, v) => (key === "retryAfter" ? `${+v.seconds + (v.nanos ?? 0) / 1e9}s` : v);
const decode = (m) => (inJSON(m) ? Envelope.fromObject(JSON.parse(m.string(), times)) : Envelope.decode(m.data));
const asJSON = { enums: String, longs: String, bytes: String };
const text = (frame) => JSON.stringify(Envelope.toObject(frame, asJSON), wait);
const respond = (m, frame) => (inJSON(m) ? m.respond(text(frame), ofJSON) : m.respond(Envelope.encode(frame).finish()));

const nc = await connect({
  servers: NATS_URL, name: `driver ${PROVIDER}`, inboxPrefix: `_INBOX_driver.${PROVIDER}`,
  maxReconnectAttempts: -1, waitOnFirstConnect: true,
});
let up = true; // the client would keep what is sent meanwhile, and send it late
(async () => { for await (const s of nc.status()) up = s.type === "reconnect" || (up && s.type !== "disconnect"); })();

// specOf asks mcm for the class and returns its providerSpec.
async function specOf(reference, signal) {
  const ask = Envelope.encode(Envelope.fromObject({ fetchClass: { class: reference } })).finish();
  if (!up) throw new Failure("UNAVAILABLE", "fetch class: not connected");
  const late = new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
  const asked = nc.request(`mcm.v1.${CLUSTER}.fetch.${PROVIDER}.class`, ask, { timeout: 2000 });
  const m = await Promise.race([asked, late]).catch((e) => {
    throw new Failure(signal.aborted ? "DEADLINE_EXCEEDED" : "UNAVAILABLE", `fetch class: ${e.message}`);
  });
  const answer = Envelope.decode(m.data), { status } = answer.fetchedClass ?? answer.result;
  if (!status?.code) return JSON.parse(Buffer.from(answer.fetchedClass.class.providerSpec).toString());
  const ofInstance = ["NOT_FOUND", "OUT_OF_RANGE", "UNINITIALIZED"].includes(codeOf(status.code)); // [FETCH-5]
  throw new Failure(ofInstance ? "FAILED_PRECONDITION" : codeOf(status.code), status.message, status);
}

const operations = {
  async create({ machine }, c) {
    const [found] = await find(c, { uid: machine.uid }); // [CREATE-1] [ENV-9]
    return { create: { instance: found ?? (await make(c, machine)) } };
  },
  async delete({ machine }, c) {
    for (const instance of await find(c, machine)) await remove(c, instance); // [DELETE-1] [DELETE-2]
    return { delete: {} };
  },
  list: async (_, c) => ({ list: { instances: await list(c) } }),
};

async function resultOf({ body, [body]: request, operationId, timeout, recover, owner }) {
  try {
    if (!Object.hasOwn(operations, body)) throw new Failure("UNIMPLEMENTED", "this driver creates, deletes and lists");
    const signal = AbortSignal.timeout(Math.ceil(Number(timeout?.seconds ?? 60) * 1000 + (timeout?.nanos ?? 0) / 1e6));
    const { class: reference } = request.class, className = reference.name, spec = await specOf(reference, signal);
    return await operations[body](request, { cluster: CLUSTER, className, operationId, owner, spec, signal });
  } catch (e) {
    // The outcome is unknown if the error is not a Failure, or if an earlier attempt may have had an effect [RESULT-3].
    const meant = e instanceof Failure, unlooked = body === "create" && recover && !e.begun;
    const status = { code: "CODE_" + (meant ? e.code : "UNKNOWN"), message: e.message, retryAfter: e.retryAfter };
    return { status, outcomeUnknown: body !== "list" && (!meant || e.outcomeUnknown || unlooked) };
  }
}

async function answer(m) {
  const env = decode(m), { operationId, attempt, acceptBy } = env, mutation = env.body !== "list";
  const stale = mutation && acceptBy && Date.now() > Number(acceptBy.seconds) * 1000 + acceptBy.nanos / 1e6;
  const body = stale ? { busy: { reason: "BUSY_REASON_STALE" } } : { result: await resultOf(env) }; // [ENV-8]
  console.log(m.subject, operationId, stale ? "stale" : body.result.status?.message ?? "OK");
  const say = (body) => up && respond(m, Envelope.fromObject({ operationId, attempt, ...body }));
  try {
    say(body);
  } catch (e) { // max_payload
    const status = { code: "CODE_INTERNAL", message: `the result cannot be sent: ${e.message}` };
    say({ result: { status, outcomeUnknown: mutation } });
  }
}

const running = new Set();
const take = (m) => {
  if (!m.reply?.startsWith(`mcm.v1.${CLUSTER}.reply.${PROVIDER}.`)) return; // [SUBJECT-4]
  const task = answer(m).catch((e) => console.error("not answered:", e.message)).finally(() => running.delete(task));
  running.add(task);
};
const callback = (error, m) => error || take(m);
const subscription = nc.subscribe(`mcm.v1.${CLUSTER}.plain.${PROVIDER}.>`, { queue: "driver", callback });
await nc.flush();
console.log("serving");
const finish = () => Promise.all(running).then(() => nc.drain()).then(() => process.exit(0));
process.once("SIGTERM", () => subscription.drain().then(finish));

// A plain driver: one request, one answer, after PROTOCOL.md. What it lacks (section 1) driver-nodejs-full has.
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { connect } from "nats";
import protobuf from "protobufjs";

const { NATS_URL = "nats://127.0.0.1:4222", CLUSTER = "default", PROVIDER = "nodejs", CLOUD_TOKEN_FILE } = process.env;
const root = new protobuf.Root(), proto = fileURLToPath(new URL("../../../proto/", import.meta.url));
root.resolvePath = (_, file) => (file.startsWith("google/") ? file : proto + file);
const Envelope = root.loadSync("machinebus/driver/v1/envelope.proto").lookupType("machinebus.driver.v1.Envelope");
const Code = root.lookupEnum("machinebus.driver.v1.Code").values;

// Protobuf, or JSON for people who try a read by hand [ENV-2]; protobufjs knows the mapping but for times.
const inJSON = (m) => m.headers?.get("Content-Type").startsWith("application/json");
const times = (key, v) => (key === "timeout" ? { seconds: Math.ceil(parseFloat(v)) } : key === "acceptBy" ? { seconds: Date.parse(v) / 1000 } : v);
const decode = (m) => (inJSON(m) ? Envelope.fromObject(JSON.parse(m.string(), times)) : Envelope.decode(m.data));
const wait = (key, v) => (key === "retryAfter" ? `${+v.seconds + (v.nanos ?? 0) / 1e9}s` : v);
const text = (frame) => JSON.stringify(Envelope.toObject(frame, { enums: String, longs: String, bytes: String }), wait);
const respond = (m, frame) => (inJSON(m) ? m.respond(text(frame), { headers: m.headers }) : m.respond(Envelope.encode(frame).finish()));

const token = CLOUD_TOKEN_FILE ? readFileSync(CLOUD_TOKEN_FILE, "utf8").trim() : "";
const nc = await connect({ servers: NATS_URL, name: `driver ${PROVIDER}`, inboxPrefix: `_INBOX_driver.${PROVIDER}`, maxReconnectAttempts: -1, waitOnFirstConnect: true });
let up = true; // the client would keep what is sent meanwhile, and send it late
(async () => { for await (const s of nc.status()) if (s.type === "disconnect" || s.type === "reconnect") up = s.type === "reconnect"; })();

const failure = (code, message, outcomeUnknown = false) => Object.assign(new Error(message), { code: Code["CODE_" + code], outcomeUnknown });
const ofInstances = [Code.CODE_NOT_FOUND, Code.CODE_OUT_OF_RANGE, Code.CODE_UNINITIALIZED], codes = { 400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "RESOURCE_EXHAUSTED", 404: "NOT_FOUND", 409: "ALREADY_EXISTS", 429: "UNAVAILABLE" };

// cloud makes one call. One that was not answered, or with a server error, may have had its effect.
async function cloud(spec, signal, method, path, body) {
  const begun = method !== "GET";
  const response = await fetch(spec.endpoint + path, {
    method, signal, body: JSON.stringify(body), headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
  }).catch((e) => { throw failure(signal.aborted ? "DEADLINE_EXCEEDED" : "UNAVAILABLE", `${method} ${path}: ${e.message}`, begun); });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw Object.assign(failure(codes[response.status] ?? "INTERNAL", answer.error?.message ?? `HTTP ${response.status}`, begun && response.status >= 500), { begun });
  return answer;
}

// specOf asks mcm for the class and returns its providerSpec.
async function specOf(reference, signal) {
  const ask = Envelope.encode(Envelope.fromObject({ fetchClass: { class: reference } })).finish();
  const late = new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
  const asked = up ? nc.request(`mcm.v1.${CLUSTER}.fetch.${PROVIDER}.class`, ask, { timeout: 2000 }) : Promise.reject(new Error("not connected"));
  const m = await Promise.race([asked, late]).catch((e) => { throw failure(signal.aborted ? "DEADLINE_EXCEEDED" : "UNAVAILABLE", `fetch class: ${e.message}`); });
  const answer = Envelope.decode(m.data), status = (answer.fetchedClass ?? answer.result).status;
  if (status?.code) throw Object.assign(new Error(status.message), { code: ofInstances.includes(status.code) ? Code.CODE_FAILED_PRECONDITION : status.code /* [FETCH-5] */, retryAfter: status.retryAfter });
  return JSON.parse(Buffer.from(answer.fetchedClass.class.providerSpec).toString());
}

const tag = (key, value) => "tag=" + encodeURIComponent(`machinebus.io/${key}=${value}`);
const instanceOf = (i) => ({ providerId: i.providerID, nodeName: i.nodeName, addresses: i.addresses, machineName: i.name, machineUid: i.tags["machinebus.io/machine-uid"] });
const ours = async (spec, signal, ...tags) => (await cloud(spec, signal, "GET", "/v1/instances?" + [tag("cluster", CLUSTER), ...tags].join("&"))).instances ?? [];
const named = (spec, signal, id) => cloud(spec, signal, "GET", "/v1/instances/" + id).then((i) => (i.tags["machinebus.io/cluster"] === CLUSTER ? [i] : []), (e) => { if (e.code !== Code.CODE_NOT_FOUND) throw e; return []; });

const operations = {
  async create(request, spec, signal, operationId) {
    const { name, uid } = request.machine;
    const [found] = await ours(spec, signal, tag("machine-uid", uid));
    const made = found ?? (await cloud(spec, signal, "POST", "/v1/instances", {
      name, machineType: spec.machineType, region: spec.region, zone: spec.zone, identity: "token", idempotencyToken: operationId,
      tags: { ...spec.tags, "machinebus.io/cluster": CLUSTER, "machinebus.io/machine-uid": uid, "machinebus.io/class": request.class.class.name },
    }));
    return { create: { instance: instanceOf(made) } };
  },
  async delete(request, spec, signal) {
    const { uid, providerId } = request.machine; // [DELETE-2]
    for (const { id } of await (providerId ? named(spec, signal, providerId.split("/").pop()) : ours(spec, signal, tag("machine-uid", uid))))
      await cloud(spec, signal, "DELETE", "/v1/instances/" + id).catch((e) => { if (e.code !== Code.CODE_NOT_FOUND) throw e; });
    return { delete: {} };
  },
  list: async (request, spec, signal) => ({ list: { instances: (await ours(spec, signal, tag("class", request.class.class.name))).map(instanceOf) } }),
};

async function resultOf(env) {
  try {
    if (!operations[env.body]) throw failure("UNIMPLEMENTED", "this driver creates, deletes and lists");
    const signal = AbortSignal.timeout(Number(env.timeout?.seconds ?? 60) * 1000 + (env.timeout?.nanos ?? 0) / 1e6);
    return await operations[env.body](env[env.body], await specOf(env[env.body].class.class, signal), signal, env.operationId);
  } catch (e) {
    const meant = Number.isInteger(e.code) && e.code > 0, unlooked = env.body === "create" && env.recover && !e.begun; // what is not known: what nobody has thrown on purpose, and what an earlier attempt has made [RESULT-3]
    return { status: { code: meant ? e.code : Code.CODE_UNKNOWN, message: e.message, retryAfter: e.retryAfter }, outcomeUnknown: env.body !== "list" && (!!e.outcomeUnknown || unlooked || !meant) };
  }
}

async function answer(m) {
  const env = decode(m), stale = env.body !== "list" && env.acceptBy && Date.now() > Number(env.acceptBy.seconds) * 1000 + env.acceptBy.nanos / 1e6;
  const body = stale ? { busy: { reason: "BUSY_REASON_STALE" } } : { result: await resultOf(env) }; // [ENV-8]
  console.log(m.subject, env.operationId, stale ? "stale" : body.result.status?.message ?? "OK");
  const say = (body) => up && respond(m, Envelope.fromObject({ operationId: env.operationId, attempt: env.attempt, ...body }));
  try { say(body); } catch (e) { say({ result: { status: { code: Code.CODE_INTERNAL, message: `the result cannot be sent: ${e.message}` }, outcomeUnknown: env.body !== "list" } }); } // max_payload
}
const running = new Set(), subscription = nc.subscribe(`mcm.v1.${CLUSTER}.plain.${PROVIDER}.>`, { queue: "driver", callback: (error, m) => {
  if (error || !m.reply?.startsWith(`mcm.v1.${CLUSTER}.reply.${PROVIDER}.`)) return; // [SUBJECT-4]
  const task = answer(m).catch((e) => console.error("not answered:", e.message)).finally(() => running.delete(task));
  running.add(task);
} });
await nc.flush().then(() => console.log("serving"));
process.once("SIGTERM", () => subscription.drain().then(() => Promise.all(running)).then(() => nc.drain()).then(() => process.exit(0)));

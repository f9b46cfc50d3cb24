// A full driver of the virtual cloud according to PROTOCOL.md: calls of the cloud, classes and secrets.
import { randomBytes } from "node:crypto";
import { createCurve } from "nkeys.js";
import { Replica } from "./replica.mjs";
import { Code, Wire, bytes, decode, encode, open } from "./wire.mjs";

const { NATS_URL = "nats://127.0.0.1:4222", CLUSTER = "default", PROVIDER = "nodejs", CONTROL_PLANE_KEY } = process.env;
const wire = await Wire.connect(NATS_URL, PROVIDER);

const failure = (code, message, outcomeUnknown = false) => Object.assign(new Error(message), { code: Code["CODE_" + code], outcomeUnknown });

// ---- what mcm knows: classes and secrets (PROTOCOL.md, 10)

const key = createCurve();
const recipient = key.getPublicKey();
let pin = CONTROL_PLANE_KEY;

// An error of mcm about a class or a secret says nothing about an instance [FETCH-5].
const ofInstances = [Code.CODE_NOT_FOUND, Code.CODE_OUT_OF_RANGE, Code.CODE_UNINITIALIZED];
const told = ({ code, message, retryAfter }) => Object.assign(new Error(message), { code: ofInstances.includes(code) ? Code.CODE_FAILED_PRECONDITION : code, retryAfter });

async function ask(what, body) {
  for (let tries = 3; ; tries--) {
    try {
      if (!wire.up) throw new Error("not connected");
      const m = await wire.nc.request(`mcm.v1.${CLUSTER}.fetch.${PROVIDER}.${what}`, encode(body), { timeout: 2000 });
      const env = decode(m.data), answer = env[env.body];
      if (answer.status?.code) throw told(answer.status);
      return answer;
    } catch (e) {
      if (Number.isInteger(e.code)) throw e; // mcm's answer; those of NATS are text, such as "503"
      if (tries === 1) throw failure("UNAVAILABLE", `fetch ${what}: ${e.message}`);
    }
  }
}

// unseal opens a box with the control plane's pinned key [FETCH-3], and checks that it answers this request [FETCH-2].
function unseal(answer, type, nonce) {
  const { sender, box } = answer.sealed;
  const trusted = pin ?? sender; // on first use; a warning says so below
  if (sender !== trusted) throw failure("UNAUTHENTICATED", "sealed with another key than the control plane's");
  const plain = key.open(box, trusted);
  const content = plain && open(type, plain);
  if (!content || !nonce.equals(content.nonce)) throw failure("UNAUTHENTICATED", "the seal does not open, or answers another question");
  if (!pin) console.log("no CONTROL_PLANE_KEY was given; trusting the one used first:", sender);
  pin = trusted;
  return content;
}

async function secretOf(reference, secret) {
  const nonce = randomBytes(16);
  const content = unseal(await ask("secret", { fetchSecret: { class: reference, secret, recipient, nonce } }), "SecretContent", nonce);
  if (content.reference.name !== secret.name || content.reference.namespace !== secret.namespace) throw failure("UNAUTHENTICATED", "another secret came");
  return content.data;
}

// classOf fetches every time, so that nothing can be outdated.
async function classOf(reference) {
  const answer = await ask("class", { fetchClass: { class: reference.class } });
  const data = {};
  for (const secret of [reference.secret, reference.credentialsSecret]) if (secret) Object.assign(data, await secretOf(reference.class, secret));
  return { spec: JSON.parse(Buffer.from(answer.class.providerSpec).toString()), name: reference.class.name, data };
}

async function userData(c, machine, operationId) {
  let text = Buffer.from(c.data.userData ?? "").toString();
  if (!/<<|%3c%3c/i.test(text)) return text;
  const nonce = randomBytes(16);
  const body = { operationId, namespace: machine.namespace, machine: machine.name, machineUid: machine.uid, recipient, nonce };
  const { values } = unseal(await ask("bootstrap", { fetchBootstrap: body }), "BootstrapContent", nonce);
  const places = Object.keys(values).filter((p) => p).sort((a, b) => b.length - a.length);
  const escaped = (s) => encodeURIComponent(s).replaceAll("%20", "+");
  for (const p of places) text = text.replaceAll(p, () => values[p]).replaceAll(escaped(p), () => escaped(values[p]));
  return text;
}

// ---- the cloud

const codes = { 400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "RESOURCE_EXHAUSTED", 404: "NOT_FOUND", 409: "ALREADY_EXISTS", 429: "UNAVAILABLE" };

// call makes one call. If it changes something, it first asks for permission, with nothing in between.
async function call(c, task, method, path, body) {
  if (method !== "GET") await task.begin();
  const request = fetch(c.spec.endpoint + path, {
    method, signal: task.signal, body: JSON.stringify(body),
    headers: { authorization: `Bearer ${Buffer.from(c.data.apiToken ?? "").toString()}`, "content-type": "application/json" },
  });
  const lost = (e) => { throw failure("UNAVAILABLE", `${method} ${path}: ${e.message}`, method !== "GET"); };
  return request.then(async (response) => {
    const telling = response.ok && method !== "DELETE"; // half an answer is no empty list
    const answer = await response.json().catch((e) => (telling ? lost(e) : {}));
    const seconds = parseInt(response.headers.get("retry-after")), retryAfter = seconds > 0 ? { seconds } : undefined;
    const code = (answer.error && codes[response.status]) ?? "INTERNAL"; // a proxy's 404 says nothing of instances
    if (!response.ok) throw Object.assign(failure(code, answer.error?.message ?? `HTTP ${response.status}`, method !== "GET" && response.status >= 500), { retryAfter });
    return answer;
  }, lost);
}

const tag = (name, value) => "tag=" + encodeURIComponent(`machinebus.io/${name}=${value}`);
const instanceOf = (i) => ({ providerId: i.providerID, nodeName: i.nodeName, addresses: i.addresses, machineName: i.name, machineUid: i.tags?.["machinebus.io/machine-uid"], owner: i.tags?.["machinebus.io/owner"] });

async function ours(c, task, ...tags) {
  const { instances } = await call(c, task, "GET", "/v1/instances?" + [tag("cluster", CLUSTER), ...tags].join("&"));
  if (!Array.isArray(instances)) throw failure("INTERNAL", "no list of instances came");
  return instances;
}

// instancesOf returns the instance with the machine's provider id, or else those tagged with its uid [DELETE-2].
async function instancesOf(c, task, { uid, providerId }) {
  if (!providerId) return ours(c, task, tag("machine-uid", uid));
  const [, id] = /^virtual:\/\/\/[^/]+\/([^/]+)$/.exec(providerId) ?? [];
  if (!id) throw failure("INVALID_ARGUMENT", `provider id ${providerId} is none of this cloud's`);
  const found = await call(c, task, "GET", "/v1/instances/" + encodeURIComponent(id)).catch((e) => { if (e.code !== Code.CODE_NOT_FOUND) throw e; });
  return found?.tags?.["machinebus.io/cluster"] === CLUSTER ? [found] : [];
}

const operations = {
  async create({ machine, class: reference }, task) {
    const c = await classOf(reference);
    const boot = await userData(c, machine, task.operationId);
    const [found] = await ours(c, task, tag("machine-uid", machine.uid)); // [CREATE-1] [ENV-9]
    if (found) return { create: { instance: instanceOf(found) } };
    task.progress("creating instance " + machine.name);
    const { machineType, region, zone, tags } = c.spec;
    const made = await call(c, task, "POST", "/v1/instances", {
      name: machine.name, machineType, region, zone, userData: Buffer.from(boot).toString("base64"), identity: "token", idempotencyToken: task.operationId, // [IDENTITY-1]
      tags: { ...tags, "machinebus.io/cluster": CLUSTER, "machinebus.io/machine-uid": machine.uid, "machinebus.io/class": c.name, ...(task.owner && { "machinebus.io/owner": task.owner }) }, // [OWNER-1]
    });
    return { create: { instance: instanceOf(made) } };
  },
  async delete({ machine, class: reference }, task) {
    const c = await classOf(reference);
    for (const { id } of await instancesOf(c, task, machine))
      await call(c, task, "DELETE", "/v1/instances/" + encodeURIComponent(id)).catch((e) => { if (e.code !== Code.CODE_NOT_FOUND) throw e; });
    return { delete: {} };
  },
  async status({ machine, class: reference }, task) {
    const list = await instancesOf(await classOf(reference), task, machine);
    if (list.length !== 1) throw failure(list.length ? "OUT_OF_RANGE" : "NOT_FOUND", `${list.length} instances`);
    return { instanceStatus: { instance: instanceOf(list[0]) } };
  },
  async list({ class: reference }, task) {
    const c = await classOf(reference);
    return { list: { instances: (await ours(c, task, tag("class", c.name))).map(instanceOf) } };
  },
};

// seal encrypts the outcome's message. Without a pinned key it omits the message.
const seal = (content) => (pin ? { sender: recipient, box: key.seal(bytes("SealedOutcome", content), pin) } : undefined);

const replica = new Replica(wire, { cluster: CLUSTER, provider: PROVIDER, createIdentity: 1, operations, seal });
replica.start();
await wire.nc.flush();
console.log("serving as", replica.id);
process.once("SIGTERM", () => replica.stop().then(() => process.exit(0)));

// Calls of the virtual cloud in the contract's terms. For another cloud, replace this file.
import { readFileSync } from "node:fs";

// A Failure is thrown on purpose, with a code of PROTOCOL.md, section 9. begun: the call that failed was to change
// something; outcomeUnknown: it may have done so.
export class Failure extends Error {
  constructor(code, message, { begun = false, outcomeUnknown = false, retryAfter } = {}) {
    super(message);
    Object.assign(this, { code, begun, outcomeUnknown, retryAfter });
  }
}

const codes = {
  400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "RESOURCE_EXHAUSTED",
  404: "NOT_FOUND", 409: "ALREADY_EXISTS", 429: "UNAVAILABLE",
};
const { CLOUD_TOKEN_FILE } = process.env;
const token = CLOUD_TOKEN_FILE ? readFileSync(CLOUD_TOKEN_FILE, "utf8").trim() : "";

// call makes one call. Without a complete answer, or after a server error, it may have had an effect.
async function call({ spec, signal }, method, path, body) {
  const begun = method !== "GET";
  const lost = (e) => {
    const code = signal.aborted ? "DEADLINE_EXCEEDED" : "UNAVAILABLE";
    throw new Failure(code, `${method} ${path}: ${e.message}`, { begun, outcomeUnknown: begun });
  };
  const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
  const request = fetch(spec.endpoint + path, { method, signal, headers, body: JSON.stringify(body) });
  const response = await request.catch(lost);
  const telling = response.ok && method !== "DELETE"; // half an answer is no empty list
  const answer = await response.json().catch((e) => (telling ? lost(e) : {}));
  if (response.ok) return answer;
  const message = answer.error?.message ?? `HTTP ${response.status}`;
  const code = (answer.error && codes[response.status]) ?? "INTERNAL"; // a proxy's 404 says nothing of instances
  throw new Failure(code, message, {
    begun, outcomeUnknown: begun && response.status >= 500,
  });
}

// absent handles a call that fails because the instance does not exist.
const absent = (e) => {
  if (e.code !== "NOT_FOUND") throw e;
};

const instanceOf = ({ providerID, nodeName, addresses, name, tags }) => ({
  providerId: providerID, nodeName, addresses, machineName: name, machineUid: tags?.["machinebus.io/machine-uid"],
  owner: tags?.["machinebus.io/owner"],
});

async function tagged(c, tags) {
  const query = Object.entries({ cluster: c.cluster, ...tags }).map(([key, value]) => `machinebus.io/${key}=${value}`);
  const path = "/v1/instances?" + query.map((tag) => "tag=" + encodeURIComponent(tag)).join("&");
  const { instances } = await call(c, "GET", path);
  if (!Array.isArray(instances)) throw new Failure("INTERNAL", `GET ${path}: no list of instances came`);
  return instances.map(instanceOf);
}

function idOf(providerId) {
  const [, id] = /^virtual:\/\/\/[^/]+\/([^/]+)$/.exec(providerId) ?? [];
  if (!id) throw new Failure("INVALID_ARGUMENT", `provider id ${providerId} is none of this cloud's`);
  return encodeURIComponent(id);
}

// list returns the instances of the class in this control plane.
export const list = (c) => tagged(c, { class: c.className });

// find returns the instance with the machine's provider id, or else those tagged with its uid.
export async function find(c, { uid, providerId }) {
  if (!providerId) return tagged(c, { "machine-uid": uid });
  const found = await call(c, "GET", "/v1/instances/" + idOf(providerId)).catch(absent);
  return found?.tags?.["machinebus.io/cluster"] === c.cluster ? [instanceOf(found)] : [];
}

// make creates the machine's instance. The operation id is the idempotency token: a second call creates no second instance.
export async function make(c, { name, uid }) {
  const { machineType, region, zone, tags } = c.spec;
  const made = await call(c, "POST", "/v1/instances", {
    name, machineType, region, zone, identity: "token", idempotencyToken: c.operationId,
    tags: {
      ...tags, "machinebus.io/cluster": c.cluster, "machinebus.io/machine-uid": uid, "machinebus.io/class": c.className,
      ...(c.owner && { "machinebus.io/owner": c.owner }), // [OWNER-1]
    },
  });
  if (made.providerID) return instanceOf(made);
  throw new Failure("INTERNAL", "POST /v1/instances: no instance came", { begun: true, outcomeUnknown: true });
}

// remove deletes an instance; it succeeds if there is none.
export const remove = (c, { providerId }) => call(c, "DELETE", "/v1/instances/" + idOf(providerId)).catch(absent);

// What is the cloud's: calls of the virtual cloud, in the contract's terms. For another cloud, write this file anew.
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

// call makes one call. One that was not answered to its end, or with a server error, may have had its effect.
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

// absent is for a call that fails because the instance is not there.
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

// list returns the instances of the class, of this control plane alone.
export const list = (c) => tagged(c, { class: c.className });

// find returns the instance that the machine says it has, else those that carry its uid.
export async function find(c, { uid, providerId }) {
  if (!providerId) return tagged(c, { "machine-uid": uid });
  const found = await call(c, "GET", "/v1/instances/" + idOf(providerId)).catch(absent);
  return found?.tags?.["machinebus.io/cluster"] === c.cluster ? [instanceOf(found)] : [];
}

// make makes the machine's instance. The cloud takes the operation id as its token: a second call makes no second one.
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

// remove removes an instance; an absent one is fine.
export const remove = (c, { providerId }) => call(c, "DELETE", "/v1/instances/" + idOf(providerId)).catch(absent);

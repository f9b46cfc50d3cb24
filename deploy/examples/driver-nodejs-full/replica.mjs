// A replica: the protocol of PROTOCOL.md, section 6, for any cloud. Service discovery is omitted.
import { randomUUID } from "node:crypto";
import { hostname } from "node:os";
import { Code, OperationNumbers, decode, decodeJSON, encode, encodeJSON, headersOfJSON, inJSON, millis, timestamp } from "./wire.mjs";

const LAST_WORDS = 2000; // for what is not stored when the replica stops
const BEGIN_BOUND = 1000; // for which the record that a call begins counts
const BEGIN_TRIES = 3;
const MUTATIONS = ["create", "initialize", "delete"];
const numberOf = (op) => OperationNumbers["OPERATION_" + op.toUpperCase()];
const failure = (code, message, outcomeUnknown = false) => ({ status: { code: Code["CODE_" + code], message }, outcomeUnknown, noEffect: outcomeUnknown });
const thrown = (code, message, more) => Object.assign(new Error(message), { code: Code["CODE_" + code], ...more });

// since returns the time since a moment by the clock that advanced further: one stops while the machine sleeps, the other can be set back.
const now = () => ({ monotonic: performance.now(), wall: Date.now() });
const since = (from) => Math.max(performance.now() - from.monotonic, Date.now() - from.wall);

export class Replica {
  id = randomUUID();
  started = Date.now();
  sequence = 0;
  epoch = 0n;
  leader = null;
  held = new Map(); // mutations that run or whose result is kept, by operation id
  machines = new Map(); // running mutations by machine uid
  unstored = new Set(); // mutations that have ended, and whose claims do not say so yet
  reads = 0;
  denied = new Map();
  draining = false;
  stopped = false;
  renewed = -Infinity;
  again = null;

  constructor(wire, config) {
    Object.assign(this, { wire, slots: 8, ...config });
    this.base = `mcm.v1.${this.cluster}.`;
  }

  start() {
    const subscribe = (subject, handle, queue) => this.wire.nc.subscribe(this.base + subject, { queue, callback: (error, m) => {
      try { if (!error) handle(m); } catch (e) { console.error("dropped:", m.subject, e.message); }
    } });
    subscribe(`replica.${this.provider}.${this.id}.>`, (m) => this.onMessage(m));
    subscribe("hello", (m) => this.onHello(m));
    this.requests = subscribe(`driver.${this.provider}.>`, (m) => this.onMessage(m), "driver");
    this.wire.onUp = () => this.renew();
    this.beat = setInterval(() => { this.forget(); this.renew(); }, 500);
    this.store = setInterval(() => this.storeAgain(), 1000);
    this.renew();
  }

  // stop drains: running operations may finish, and their outcomes be stored or acknowledged. [6.7]
  async stop() {
    this.draining = true;
    this.renew();
    await this.requests.drain();
    await Promise.all([...this.held.values()].map((h) => h.done));
    const until = performance.now() + LAST_WORDS;
    while (this.unstored.size > 0 && performance.now() < until) await new Promise((resolve) => setTimeout(resolve, 20));
    clearInterval(this.beat);
    clearInterval(this.store);
    this.stopped = true;
    this.renew();
    await this.wire.nc.drain();
  }

  // ---- sessions

  renew() {
    if (!this.stopped && performance.now() - this.renewed < 50) { // a burst of settled operations is no burst of sessions
      this.again ??= setTimeout(() => { this.again = null; if (!this.stopped) this.renew(); }, 50);
      return;
    }
    this.renewed = performance.now();
    const session = {
      cluster: this.cluster, provider: this.provider, replica: this.id, sequence: ++this.sequence, startedAt: timestamp(this.started), version: "0.1.0",
      protocol: 1, protocolMin: 1,
      slots: this.slots, running: this.machines.size, deleting: this.taken("delete"), draining: this.draining, stopped: this.stopped, createIdentity: this.createIdentity,
      capabilities: Object.keys(this.operations).map(numberOf), hostname: hostname(), epoch: String(this.epoch), ...this.listed(),
    };
    this.wire.publish(`${this.base}session.${this.provider}.${this.id}`, encode({ replica: this.id, session }));
  }

  // listed returns a session's operations, as many as fit, running ones first.
  listed() {
    const most = Math.min(512 << 10, this.wire.nc.info.max_payload) - 4096; // of which the rest takes less
    let bytes = 0;
    const all = [...this.held.values()].sort((a, b) => !!a.result - !!b.result).map((h) => this.stateOf(h));
    const operations = all.filter((state) => (bytes += encode({ session: { operations: [state] } }).length) <= most);
    return { operations, omitted: all.length - operations.length };
  }

  // taken counts the slots in use: deletes have their own, so that none waits behind creates.
  taken(op) {
    return [...this.machines.values()].filter((h) => (h.op === "delete") === (op === "delete")).length;
  }

  // counts reports whether a result is the outcome of the operation, or leaves it open [FENCE-3].
  counts(h) { return !h.askedAgain || h.stored || h.result?.outcomeUnknown; }

  stateOf(h) {
    return {
      operationId: h.id, attempt: h.attempt, operation: numberOf(h.op), namespace: h.namespace, name: h.name, settled: !!h.result,
      code: h.result?.status?.code ?? 0, elapsed: timestamp((h.ended ?? Date.now()) - h.startedAt), lastProgress: h.result ? "" : h.progress ?? "", fenced: !!h.fenced,
    };
  }

  // ---- requests

  onMessage(m) {
    if (m.reply && !m.reply.startsWith(`${this.base}reply.${this.provider}.`)) return; // [SUBJECT-4]
    const json = inJSON(m), env = json ? decodeJSON(m.string()) : decode(m.data), tokens = m.subject.split(".");
    const [verb, namespace, name] = tokens.slice(tokens[3] === "replica" ? 6 : 5).map((t) => t.replaceAll("~", "."));
    if (verb === "ops") return this.onOps(m, env);
    if (verb === "cancel") return this.onCancel(env);
    if (verb === "ack") return this.onAck(this.held.get(env.acknowledge.operationId));
    if (!m.reply) return;
    const h = {
      id: env.operationId, op: env.body, namespace, name, attempt: env.attempt, reply: m.reply, json, env, request: env[env.body], startedAt: Date.now(),
      machine: env[env.body]?.machine?.uid,
    };
    if (!this.operations[verb]) return this.send(h, { result: failure("UNIMPLEMENTED", `this driver does not implement ${verb}`) });
    if (verb !== h.op || !h.id || (MUTATIONS.includes(verb) && !h.machine)) return this.send(h, { result: failure("INVALID_ARGUMENT", "subject and envelope do not fit") });
    if (!MUTATIONS.includes(verb)) return this.onRead(h);
    if (json || !env.claimTerms) return this.send(h, { result: failure("INVALID_ARGUMENT", json ? "mutations are protobuf only" : "no claim_terms [CLAIM-6]") });
    this.onMutation(h);
  }

  async onRead(h) {
    if (this.strange) return this.send(h, { busy: { reason: 7 } });
    if (this.draining || this.reads >= this.slots) return this.send(h, { busy: { reason: this.draining ? 2 : 1 } });
    this.reads++;
    const slow = setTimeout(() => this.send(h, { accepted: {} }), 100); // [ACCEPT-2]
    const result = await this.run(h);
    clearTimeout(slow);
    this.reads--;
    this.send(h, { result });
  }

  onMutation(h) {
    const { env } = h, epoch = BigInt(String(env.epoch));
    if (env.acceptBy && Date.now() > millis(env.acceptBy)) return this.send(h, { busy: { reason: 6 } }); // [ENV-8]
    if (epoch < this.epoch) return this.send(h, { result: failure("ABORTED", `epoch ${this.epoch} leads`, true) }); // [ENV-6]
    this.epoch = epoch;
    const known = this.held.get(h.id), terms = env.claimTerms;
    const named = terms && Object.hasOwn(terms, "sequence"); // presence: 0 is a sequence
    const sequence = named && BigInt(String(terms.sequence)); // 64-bit numbers come in several types
    const overtaken = known && !known.claiming && named && (sequence < known.firstClaim || sequence > known.claim); // what is in between was ours
    const failed = env.earlierMayRun && known?.result?.status?.code > 0; // which says nothing of an attempt made since
    if (known && !(h.attempt > known.attempt && (overtaken || failed))) {
      Object.assign(known, { reply: h.reply, attempt: h.attempt }); // [RUN-2]
      known.env.earlierMayRun ||= env.earlierMayRun;
      known.askedAgain ||= !known.stored; // another attempt may be on its way to the claim's place
      if (!known.claiming) this.send(known, { accepted: {} });
      if (known.result && this.counts(known)) this.send(known, { result: known.result });
      return;
    }
    if (known?.result) this.held.delete(h.id); // superseded
    const denial = this.denied.get(h.id);
    const refuse = (reason) => this.send(h, { busy: { reason } });
    if (denial && h.attempt <= denial.attempt && since(denial.at) < 4000) return refuse(0);
    if (this.strange) return refuse(7);
    if (this.draining) return refuse(2);
    if (this.machines.has(h.machine)) return refuse(3);
    if (this.taken(h.op) >= this.slots) return refuse(1);
    if (!named) return refuse(4);
    h.claiming = true;
    this.held.set(h.id, h);
    this.machines.set(h.machine, h);
    h.done = this.mutate(h);
  }

  async mutate(h) {
    const answer = await this.put(h, { state: 1 }, h.env.claimTerms.sequence); // [CLAIM-1]
    h.claiming = false;
    if (!answer.seq) {
      this.held.delete(h.id);
      this.machines.delete(h.machine);
      this.send(h, { busy: { reason: answer.conflict ? 4 : 5 } });
      return this.renew();
    }
    h.firstClaim = h.claim = answer.seq;
    this.send(h, { accepted: {} });
    const result = await this.run(h);
    await h.beginning; // its record would be in the way of what came of it
    h.result = result;
    h.ended = Date.now();
    this.machines.delete(h.machine);
    if (h.result.outcomeUnknown) this.held.delete(h.id); // [RESULT-4]
    this.storeOutcome(h);
    if (this.counts(h)) this.send(h, { result: h.result });
    this.renew();
  }

  // run calls the driver, and always returns a result [RESULT-1].
  async run(h) {
    const deadline = AbortSignal.timeout(h.env.timeout ? millis(h.env.timeout) : 60000);
    const late = new Promise((_, reject) => deadline.addEventListener("abort", () => reject(new Error("the deadline has passed")), { once: true }));
    const task = {
      operationId: h.id, cluster: this.cluster, owner: h.env.owner, recover: h.env.recover, signal: deadline,
      progress: (message) => { h.progress = message; this.send(h, { progress: { message } }); },
      // begin must be awaited right before each call that changes something, one at a time, with nothing in between.
      begin: () => {
        const begins = this.begin(h, deadline);
        h.beginning = begins.catch(() => {});
        return begins;
      },
    };
    try {
      const result = { status: {}, ...(await Promise.race([this.operations[h.op](h.request, task), late])) };
      if (MUTATIONS.includes(h.op)) this.check(h, result);
      return result;
    } catch (e) {
      const meant = Number.isInteger(e.code) && e.code > 0; // else nobody has thrown it on purpose
      const code = deadline.aborted ? Code.CODE_DEADLINE_EXCEEDED : meant ? e.code : Code.CODE_UNKNOWN;
      const own = !!e.outcomeUnknown || (!!h.begun && (deadline.aborted || !!e.fenced || !meant)); // what this attempt has done is not known [RESULT-3]
      // An earlier attempt may have had an effect, or may still have one [RESULT-5].
      const earlier = !!e.fenced || (h.op === "create" && ((h.env.recover && !h.begun) || h.env.earlierMayRun));
      const unknown = MUTATIONS.includes(h.op) && (own || earlier);
      return { status: { code, message: e.message, retryAfter: e.retryAfter }, outcomeUnknown: unknown, noEffect: unknown && !own }; // [RESULT-6]
    }
  }

  // begin records in the claim that a call begins, in place of the last record. It throws if that fails.
  async begin(h, deadline) {
    const live = () => {
      if (deadline.aborted) throw thrown("DEADLINE_EXCEEDED", "the deadline has passed");
      if (h.cancelled) throw thrown("CANCELED", "cancelled");
    };
    for (let tries = BEGIN_TRIES; tries > 0; tries--) {
      live();
      const sent = now(), answer = await this.put(h, { state: 4 }, h.claim); // [FENCE-1]
      if (answer.seq) h.claim = answer.seq;
      h.fenced ||= this.replaced(answer);
      if (!h.fenced) live();
      if (!answer.seq) break;
      if (since(sent) > BEGIN_BOUND) continue; // another attempt may have its place since [FENCE-2]
      h.begun = true;
      return;
    }
    console.log("fenced", h.id, "attempt", h.attempt);
    throw thrown("ABORTED", "its claim was not written again: nothing was begun", { fenced: true });
  }

  // replaced reports whether another record is in the claim's place: a conflict without its sequence is with a write that may yet be lost.
  replaced(answer) { return !!answer.conflict && answer.there !== null; }

  // check throws for an answer that mcm cannot use or that cannot be sent; the outcome of started calls is then unknown.
  check(h, result) {
    const most = Math.min(this.wire.nc.info.max_payload, MUTATIONS.includes(h.op) ? 1 << 20 : Infinity), room = most - Math.min(4096, most / 4), { length } = encode({ result });
    const why = length > room ? `the result cannot be sent: ${length} bytes, where there is room for ${room}`
      : h.op === "create" && !result.create?.instance?.providerId && "there is no provider id in the result [INSTANCE-1]";
    if (why) throw thrown("INTERNAL", why, { outcomeUnknown: !!h.begun });
  }

  // ---- claims

  put(h, more, expected) {
    const claim = {
      operationId: h.id, attempt: h.attempt, operation: numberOf(h.op), namespace: h.namespace, name: h.name, provider: this.provider, replica: this.id,
      epoch: h.env.epoch, claimedAt: timestamp(h.startedAt), ...more,
    };
    return this.wire.put(`${this.base}claim.${this.provider}.${h.machine}`, { operationId: h.id, attempt: h.attempt, replica: this.id, claim }, expected);
  }

  async storeOutcome(h) { // [CLAIM-5]
    h.storing = true;
    this.unstored.add(h);
    const { status, outcomeUnknown } = h.result, payload = h.result[h.op], instance = payload?.instance;
    const outcome = outcomeUnknown ? undefined : {
      code: status.code, retryAfter: status.retryAfter, providerId: instance?.providerId, nodeName: instance?.nodeName, addresses: instance?.addresses,
      sealed: this.seal?.({ operationId: h.id, message: status.message, lastKnownState: payload?.lastKnownState }),
    };
    const answer = await this.put(h, { state: outcomeUnknown ? 3 : 2, endedAt: timestamp(h.ended), outcome }, h.claim);
    if (answer.seq) h.claim = answer.seq;
    const counted = this.counts(h);
    h.fenced ||= this.replaced(answer);
    h.stored = !!answer.seq || this.replaced(answer);
    h.storing = false;
    if (h.stored) this.unstored.delete(h);
    if (!counted && answer.seq) this.send(h, { result: h.result }); // it was waited for
    if (h.askedAgain && h.stored && !answer.seq && this.held.get(h.id) === h) this.held.delete(h.id); // the other attempt counts
    if (h.known) this.onAck(h);
  }

  // onAck forgets a result that mcm has, but not before its claim has ended, which no other replica would end.
  onAck(h) {
    if (!h?.result) return;
    h.known = true;
    if (h.stored && this.held.get(h.id) === h) this.held.delete(h.id);
  }

  // forget limits the results kept for an mcm that never acknowledges [RESULT-2].
  forget() {
    const settled = [...this.held.values()].filter((h) => h.result).sort((a, b) => a.ended - b.ended);
    const old = (h) => Date.now() - h.ended > 24 * 3600e3;
    for (const [n, h] of settled.entries()) if (settled.length - n > 2048 || old(h)) this.held.delete(h.id);
    for (const h of this.unstored) if (old(h)) this.unstored.delete(h);
  }

  storeAgain() {
    for (const h of this.unstored) if (!h.storing) this.storeOutcome(h);
  }

  // ---- control

  onOps(m, env) {
    if (!m.reply) return;
    const id = env.ops.operationId;
    const found = [...this.held.values()].filter((h) => !id || h.id === id);
    if (id && found.every((h) => h.fenced) && env.attempt > 0) this.denied.set(id, { attempt: env.attempt, at: now() }); // [OPS-1]
    for (const [key, d] of this.denied) if (since(d.at) > 4000) this.denied.delete(key);
    const opsHeld = { operations: found.map((h) => this.stateOf(h)), result: id && found[0] && this.counts(found[0]) ? found[0].result : undefined };
    this.send({ reply: m.reply, id: env.operationId, attempt: env.attempt }, { opsHeld });
  }

  onCancel(env) {
    const h = this.held.get(env.cancel.operationId);
    if (h && !h.begun && BigInt(String(env.epoch)) >= this.epoch) h.cancelled = true; // [CANCEL-1]
  }

  onHello(m) {
    const { hello } = decode(m.data), epoch = BigInt(String(hello.epoch));
    if (epoch > this.epoch) this.epoch = epoch;
    if (epoch >= this.epoch) this.understand(hello);
    if (hello.mcm !== this.leader) this.renew(); // [HELLO-1]
    this.leader = hello.mcm;
  }

  // understand records whether the leading manager supports version 1 of the contract, the only one supported here. [HELLO-2]
  understand(hello) {
    const min = hello.protocolMin || hello.protocolMax || 1, max = Math.max(min, hello.protocolMax), strange = min > 1;
    if (strange !== !!this.strange) {
      if (strange) console.error(`no work is taken: manager ${hello.mcm} speaks protocol version ${min} to ${max}, and this driver speaks 1: upgrade this driver`);
      else console.log("work is taken again: the manager that leads speaks the protocol");
    }
    this.strange = strange;
  }

  send(h, body) {
    const frame = (body) => ({ operationId: h.id, attempt: h.attempt, replica: this.id, ...body }); // [ENV-5] [ENV-7]
    const publish = (body) => (h.json ? this.wire.publish(h.reply, encodeJSON(frame(body)), { headers: headersOfJSON }) : this.wire.publish(h.reply, encode(frame(body))));
    try {
      publish(body);
    } catch (e) {
      console.error("not sent:", h.id, e.message);
      if (!body.result) return;
      const instead = failure("INTERNAL", `the result cannot be sent: ${e.message}`); // or mcm would ask for it for ever
      if (h.result) h.result = instead;
      publish({ result: instead });
    }
  }
}

// A lease is what a replica knows of its standing: until when mcm cannot have given its operations to somebody else
// (PROTOCOL.md, 6.6). It talks to nobody and starts no clock.
import { randomUUID } from "node:crypto";

const FENCE_BOUND = 1200;

// elapsed is the time since a moment by the clock that ran further: one stands still while the machine sleeps, the other can be set back.
export const now = () => ({ monotonic: performance.now(), wall: Date.now() });
const elapsed = (from, to) => Math.max(to.monotonic - from.monotonic, to.wall - from.wall);

export class Lease {
  sessionId = randomUUID();
  generation = 0;
  last = 0n; // the stream's sequence of what the next session replaces
  acked = null; // when the newest acknowledged session was sent
  ended = false;
  sent = new Map(); // by a session's own sequence: when, and what it expected

  // send notes that a session is about to be sent and returns what it expects to replace.
  send(sequence) {
    this.sent.set(sequence, { at: now(), expected: this.last });
    this.sent.delete(sequence - 64);
    return this.last;
  }

  // stored notes an acknowledgement.
  stored(sequence, at) {
    const sent = this.sent.get(sequence);
    if (!sent || at < this.last) return;
    if (!this.acked || elapsed(this.acked, sent.at) > FENCE_BOUND) this.generation++; // [FENCE-2]
    this.acked = sent.at;
    this.last = at;
    for (const s of this.sent.keys()) if (s <= sequence) this.sent.delete(s);
  }

  // refused notes that something else is there. It returns whether that ended the lease [FENCE-1].
  refused(sequence, at) {
    const sent = this.sent.get(sequence);
    this.sent.delete(sequence);
    if (!sent || sent.expected !== this.last || this.ended) return false;
    Object.assign(this, { sessionId: randomUUID(), generation: this.generation + 1, last: at, acked: null, sent: new Map() });
    return true;
  }

  end() {
    this.ended = true;
    this.generation++;
  }

  holds() {
    return !this.ended && this.acked !== null && elapsed(this.acked, now()) <= FENCE_BOUND;
  }
}

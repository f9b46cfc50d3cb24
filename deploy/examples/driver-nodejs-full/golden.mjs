// Decodes and encodes the golden frames of PROTOCOL.md, and opens the golden seal:
// node golden.mjs ../../../bus/testdata
import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { fromCurveSeed } from "nkeys.js";
import { open, root } from "./wire.mjs";

const dir = process.argv[2];
const read = (file) => JSON.parse(readFileSync(`${dir}/${file}`, "utf8"));
const Envelope = root.lookupType("machinebus.driver.v1.Envelope");
let frames = 0;
for (const file of readdirSync(`${dir}/wire`).filter((f) => f.endsWith(".json"))) {
  const frame = read(`wire/${file}`), env = Envelope.decode(Buffer.from(frame.protobuf, "hex"));
  assert.ok(!env.body || frame.json[env.body], `${file}: the body is ${env.body}, JSON says another`);
  assert.equal(Buffer.from(Envelope.encode(env).finish()).toString("hex"), frame.protobuf, file);
  frames++;
}

const seal = read("seal.json"), bytes = (text) => new Uint8Array(Buffer.from(text, "hex"));
const sender = fromCurveSeed(new TextEncoder().encode(seal.senderSeed)), recipient = fromCurveSeed(new TextEncoder().encode(seal.recipientSeed));
assert.equal(recipient.getPublicKey(), seal.recipient);
assert.equal(Buffer.from(sender.seal(bytes(seal.plain), seal.recipient, bytes(seal.boxNonce))).toString("hex"), seal.box);
assert.equal(Buffer.from(open("SecretContent", recipient.open(bytes(seal.box), seal.sender)).data.token).toString(), "t0ps3cret");
console.log(frames, "frames and a seal");

// Recordings as files: saved, opened as untrusted input, and laid beside each other.
//
// What is opened is checked before anything reads it, by the rules of docs/feed.md: known events with
// fields of the right kinds, finite numbers from 0 on, columns of one length, and no request, worker
// or block that nothing introduced.

import { Lane } from "./lane.js";
import { Recording } from "./recording.js";

const MAX_BYTES = 32 << 20;

/** A file that is not a recording this page can show; its message is a sentence for the reader. */
export class RecordingError extends Error {}

/** A recording as a gzipped file: the events as they came, one per line. It has no text of a request. */
export async function saveRecording(recording) {
  const lines = recording.events.map((event) => `${JSON.stringify(event)}\n`).join("");
  const packed = new Blob([lines]).stream().pipeThrough(new CompressionStream("gzip"));
  return new Blob([await new Response(packed).arrayBuffer()], { type: "application/gzip" });
}

/**
 * The recording in a file.
 *
 * @throws {RecordingError} it is too large, damaged, or not a recording
 */
export async function openRecording(file) {
  const recording = new Recording();
  recording.title = file.name;
  const text = await unpacked(file);
  try {
    for (const event of check(text)) recording.add(event);
  } catch (error) {
    throw new RecordingError(`${file.name} is not a recording that can be shown: ${error.message}.`);
  }
  return recording;
}

async function unpacked(file) {
  if (file.size > MAX_BYTES) throw new RecordingError(`${file.name} is larger than 32 MiB.`);
  const start = new Uint8Array(await file.slice(0, 2).arrayBuffer());
  const isPacked = start[0] === 0x1f && start[1] === 0x8b;
  const stream = isPacked ? file.stream().pipeThrough(new DecompressionStream("gzip")) : file.stream();
  const reader = stream.getReader();
  const decoder = new TextDecoder("utf-8", { fatal: true });
  let size = 0;
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return text + decoder.decode();
      size += value.length;
      if (size > MAX_BYTES) throw new RecordingError(`${file.name} is larger than 32 MiB when unpacked.`);
      text += decoder.decode(value, { stream: true });
    }
  } catch (error) {
    if (error instanceof RecordingError) throw error;
    throw new RecordingError(`${file.name} cannot be read: it is cut off, or not text in UTF-8.`);
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Two recordings on one clock: each begins with its own first request.
 *
 * The result has the lanes of both, those of the second below, and its workers as further strips.
 */
export function besides(first, second) {
  const both = new Recording();
  both.hello = first.hello;
  both.title = `${first.title || "now"} and ${second.title}`;
  const rows = Math.max(0, ...first.lanes.map((lane) => lane.row)) + 1;
  const sides = [
    { from: first, shift: 0, rows: 0, workers: 0, name: "A" },
    { from: second, shift: startOf(first) - startOf(second), rows, workers: Math.max(1, first.workers.length), name: "B" },
  ];
  for (const side of sides) join(both, side);
  both.steps.sort((a, b) => a.end - b.end);
  both.zero = startOf(first);
  both.end = Math.max(...both.lanes.map((lane) => (lane.end < Infinity ? lane.end : 0)), ...both.steps.slice(-1).map((step) => step.end));
  both.paces = first.paces;
  both.blocks = first.blocks;
  both.events = first.events;
  return both;
}

const startOf = (recording) => recording.lanes[0]?.at ?? recording.zero;

function join(both, { from, shift, rows, workers, name }) {
  const names = from.workers.length > 1 ? from.workers.map((worker) => `${name} ${worker}`) : [name];
  both.workers.push(...names);
  const steps = new Map(
    from.steps.map((step) => [step, { ...step, start: step.start + shift, end: step.end + shift, worker: step.worker + workers }]),
  );
  const lanes = new Map(from.lanes.map((lane) => [lane, shifted(lane, steps, { shift, rows, name })]));
  for (const step of steps.values()) {
    step.prefill = step.prefill.map((one) => ({ ...one, lane: lanes.get(one.lane) ?? one.lane }));
    step.decode = step.decode.map((one) => ({ ...one, lane: lanes.get(one.lane) ?? one.lane }));
  }
  both.lanes.push(...lanes.values());
  both.steps.push(...steps.values());
}

function shifted(lane, steps, { shift, rows, name }) {
  const moved = Object.assign(new Lane(`${name}${lane.key}`, lane.at + shift), { ...lane, key: `${name}${lane.key}`, at: lane.at + shift });
  for (const field of ["begun", "first", "end"]) moved[field] = lane[field] + shift;
  moved.row = lane.row + rows;
  moved.waits = lane.waits.map(([start, end]) => [start + shift, end + shift]);
  const move = (one) => ({ ...one, start: one.start + shift, end: one.end + shift, step: steps.get(one.step) ?? one.step });
  moved.chunks = lane.chunks.map(move);
  moved.ticks = lane.ticks.map(move);
  if (lane.transfer) moved.transfer = { ...lane.transfer, start: lane.transfer.start + shift, end: lane.transfer.end + shift };
  return moved;
}

const MAX_DEPTH = 12;
const MAX_BLOCKS = 1 << 22;
const MAX_TIME_MS = 1e12;

/* Kinds of values: each is a function that says whether a value is of it. */
const number = (value) => typeof value === "number";
const whole = (value) => Number.isSafeInteger(value);
const text = (value) => typeof value === "string";
const truth = (value) => typeof value === "boolean";
const object = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const listOf = (kind) => (value) => Array.isArray(value) && value.every(kind);
const orNull = (kind) => (value) => value === null || kind(value);
const optional = (kind) => (value) => value === undefined || kind(value);
const tuple = (least, kind) => (value) => Array.isArray(value) && value.length >= least && value.every(kind);
const shape = (fields) => (value) => object(value) && Object.entries(fields).every(([name, kind]) => kind(value[name]));
const range = tuple(2, whole);

const LANE = {
  lane: whole,
  at: optional(number),
  own: optional(truth),
  id: optional(text),
  arrival: optional(number),
  prompt: optional(whole),
  cached: optional(whole),
  done: optional(whole),
  output: optional(whole),
  worker: optional(whole),
  state: optional(text),
  why: optional(text),
  route: optional(text),
  eta_ms: optional(number),
  miss: optional(orNull(shape({ reason: text, part: optional(text) }))),
  transfer: optional(orNull(shape({ start: optional(number), end: optional(number), blocks: optional(whole), stored: optional(whole) }))),
  finish: optional(orNull(text)),
  timings: optional(orNull(shape({ ttft_ms: optional(orNull(number)), tpot_ms: optional(orNull(number)), ledger_ms: optional((value) => object(value) && Object.values(value).every(number)) }))),
};
const COLUMNS = ["start", "duration_ms", "decode_ms", "pre", "dec"];
const MORE_COLUMNS = ["predicted_ms", "prefill_flops", "decode_flops", "prefill_bytes", "decode_bytes", "running", "waiting", "bookkeeping_ms"];
const EVENTS = {
  hello: {
    format: text,
    version: whole,
    boot: text,
    origin: number,
    model: optional(text),
    quantization: optional(text),
    context: optional(whole),
    block_size: optional(whole),
    itl_slo_ms: optional(orNull(number)),
    ceilings: optional(orNull(shape({ int8_ops: optional(orNull(number)), float32_flops: optional(orNull(number)), bandwidth: optional(listOf(tuple(2, number))) }))),
    workers: listOf(shape({ id: text, role: optional(text), state: optional(text), num_blocks: optional(orNull((value) => whole(value) && value <= MAX_BLOCKS)) })),
    lanes: listOf(shape(LANE)),
  },
  lane: LANE,
  steps: {
    worker: whole,
    first: whole,
    start: listOf(number),
    duration_ms: listOf(number),
    decode_ms: listOf(number),
    pre: listOf(listOf(tuple(2, number))),
    dec: listOf(listOf(tuple(2, whole))),
    ...Object.fromEntries(MORE_COLUMNS.map((name) => [name, optional(listOf(number))])),
  },
  blocks: {
    worker: whole,
    whole: optional(truth),
    lanes: listOf((value) => Array.isArray(value) && whole(value[0]) && whole(value[1]) && listOf(range)(value[2])),
    cached: optional(listOf(range)),
    freed: optional(listOf(range)),
    held: optional(whole),
    shared: optional(whole),
    num_cached: optional(whole),
    free: optional(whole),
  },
  totals: { workers: optional(listOf(shape({ id: text }))) },
  pace: { at: number, itl_slo_ms: orNull(number) },
  lost: { steps: whole },
};

/**
 * The events of a recording, checked.
 *
 * @yields {object} each known event; others are skipped
 * @throws {Error} the text is not a recording; the message is half a sentence
 */
export function* check(source) {
  const known = { lanes: new Set(), workers: [], others: null, first: true };
  let count = 0;
  for (const line of source.split("\n")) {
    count += 1;
    if (line.trim() === "") continue;
    const event = parsed(line, count);
    if (known.first && (event.event !== "hello" || event.format !== "twinphase-recording" || event.version !== 1)) {
      throw new Error("its first line is not the `hello` of a twinphase-recording, version 1");
    }
    known.first = false;
    const fields = Object.hasOwn(EVENTS, event.event) ? EVENTS[event.event] : null;
    if (fields === null) continue;
    for (const [name, kind] of Object.entries(fields)) {
      if (!kind(event[name])) throw new Error(`line ${count} has a wrong \`${name}\``);
    }
    checkReferences(event, known, count);
    yield event;
  }
  if (known.first) throw new Error("it is empty");
}

function parsed(line, count) {
  let event;
  try {
    event = JSON.parse(line);
  } catch {
    throw new Error(`line ${count} is not valid JSON`);
  }
  if (!object(event) || typeof event.event !== "string" || !number(event.t)) throw new Error(`line ${count} is not an event`);
  checkNumbers(event, 0, count);
  return event;
}

function checkNumbers(value, depth, count) {
  if (depth > MAX_DEPTH) throw new Error(`line ${count} is nested too deeply`);
  if (typeof value === "number" && !(value >= 0 && Number.isFinite(value))) throw new Error(`line ${count} has a number that is not finite, or below 0`);
  if (value !== null && typeof value === "object") for (const one of Object.values(value)) checkNumbers(one, depth + 1, count);
}

function checkReferences(event, known, count) {
  if (event.event === "hello") {
    known.workers = event.workers.map((worker) => worker.num_blocks ?? 0);
    known.others = event.others;
    for (const { lane } of event.lanes) known.lanes.add(lane);
  }
  if (event.event === "lane") known.lanes.add(event.lane);
  if (event.event === "totals" && event.workers) for (let i = known.workers.length; i < event.workers.length; i += 1) known.workers.push(MAX_BLOCKS);
  const times = [event.t, event.at ?? 0, ...(event.start ?? [])];
  if (times.some((time) => time > MAX_TIME_MS)) throw new Error(`line ${count} has a time that is too large`);
  const isNew = (lane) => !known.lanes.has(lane) && !(lane === 0 && known.others === "sum");
  if (event.event === "steps") {
    const length = event.start.length;
    const columns = [...COLUMNS, ...MORE_COLUMNS.filter((name) => event[name] !== undefined)];
    if (columns.some((name) => event[name].length !== length)) throw new Error(`line ${count} has columns of different lengths`);
    if ([...event.pre, ...event.dec].flat().some(([lane]) => isNew(lane))) throw new Error(`line ${count} names a request that does not exist`);
  }
  if (event.event !== "steps" && event.event !== "blocks") return;
  if (event.worker >= known.workers.length) throw new Error(`line ${count} names a worker that does not exist`);
  if (event.event === "steps") return;
  if (event.lanes.some(([lane]) => isNew(lane))) throw new Error(`line ${count} names a request that does not exist`);
  const all = [...event.lanes.flatMap(([, , ranges]) => ranges), ...(event.cached ?? []), ...(event.freed ?? [])];
  const size = known.workers[event.worker] || MAX_BLOCKS;
  if (all.some(([first, length]) => first + length > size)) throw new Error(`line ${count} names a KV block that does not exist`);
}

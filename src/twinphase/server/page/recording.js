// What the feed says, decoded: the lanes, steps and KV blocks that every view draws from.
//
// Live, a recording grows event by event; a file has the same events and goes through the same
// reader. The format is that of docs/feed.md. Times here are milliseconds on one clock, which goes
// on when the engine is restarted.

import { Lane, PHASE } from "./lane.js";

/** The blocks of one worker at one moment. */
class BlockMap {
  constructor(count) {
    this.named = new Array(count).fill(null); // "cached" or free, as it was last said
    this.holders = new Array(count).fill(null); // lanes, or null
    this.lists = new Map(); // lane: its block ids, in order
    this.counts = null; // {held, shared, cached, free}
  }

  apply(change) {
    if (change.whole) {
      this.named.fill(null);
      this.holders.fill(null);
      this.lists.clear();
    }
    for (const [lane, kept, ranges] of change.lanes) {
      const list = this.lists.get(lane) ?? [];
      for (const block of list.splice(kept)) this.release(block, lane);
      each(ranges, (block) => {
        list.push(block);
        this.holders[block] = [...(this.holders[block] ?? []), lane];
        this.named[block] ??= null;
      });
      if (list.length) this.lists.set(lane, list);
      else this.lists.delete(lane);
    }
    each(change.cached ?? [], (block) => (this.named[block] = "cached"));
    each(change.freed ?? [], (block) => (this.named[block] = null));
    if (change.held !== undefined) this.counts = { held: change.held, shared: change.shared, cached: change.num_cached, free: change.free };
  }

  release(block, lane) {
    const left = (this.holders[block] ?? []).filter((one) => one !== lane);
    this.holders[block] = left.length ? left : null;
  }

  /** For each block its holders, `"cached"`, or null. */
  get state() {
    return this.named.map((name, block) => this.holders[block] ?? name);
  }
}

function each(ranges, action) {
  for (const [first, count] of ranges) for (let block = first; block < first + count; block += 1) action(block);
}

export class BlockHistory {
  constructor() {
    this.workers = []; // by number: {changes, map, next}
    this.lastAt = 0;
  }

  /** A new engine: its workers have so many blocks, all of them free. */
  reset(at, counts) {
    counts.forEach((count, worker) => this.add({ worker, at, whole: true, lanes: [], size: count }));
  }

  add(change) {
    const history = (this.workers[change.worker] ??= { size: 0, changes: [], map: null, next: 0 });
    history.size = Math.max(history.size, change.size ?? 0);
    history.changes.push(change);
    this.lastAt = Math.max(this.lastAt, change.at);
  }

  /** The blocks of a worker at a moment; null where nothing was ever said of them. */
  at(t, worker) {
    const history = this.workers[worker];
    if (!history) return null;
    const { changes } = history;
    // Going back in time begins anew; going on continues.
    if (history.map === null || (history.next > 0 && changes[history.next - 1].at > t)) {
      history.map = new BlockMap(history.size);
      history.next = 0;
    }
    while (history.next < changes.length && changes[history.next].at <= t) {
      history.map.apply(changes[history.next]);
      history.next += 1;
    }
    return history.map;
  }

  /**
   * Forget how it came to be as it was at a moment.
   *
   * @param numberOf gives a lane's number in the feed
   * @returns for each worker a `blocks` event that says everything
   */
  forget(t, numberOf) {
    return this.workers.flatMap((history, worker) => {
      const map = this.at(t, worker);
      const lanes = [...map.lists].map(([lane, list]) => [lane, 0, ranges(list)]);
      const cached = map.named.flatMap((name, block) => (name === "cached" ? [block] : []));
      const counts = map.counts ? { held: map.counts.held, shared: map.counts.shared, num_cached: map.counts.cached, free: map.counts.free } : {};
      const whole = { worker, whole: true, lanes, cached: ranges(cached), freed: [], ...counts };
      history.changes = [{ ...whole, at: t }, ...history.changes.slice(history.next)];
      history.map = null;
      history.next = 0;
      const known = lanes.map(([lane, kept, list]) => [numberOf(lane), kept, list]).filter(([number]) => number !== undefined);
      return [{ event: "blocks", ...whole, lanes: known }];
    });
  }
}

/** Block ids as ranges `[first, count]`. */
function ranges(blocks) {
  const found = [];
  for (const block of blocks) {
    const last = found.at(-1);
    if (last && last[0] + last[1] === block) last[1] += 1;
    else found.push([block, 1]);
  }
  return found;
}

const KEPT_MS = 10 * 60 * 1000; // a live page forgets what is older; a file keeps all that it has
const TRIM_EVERY_MS = 60 * 1000;
const ROW_REUSE_MS = 8000; // a row of the time line is free again this long after its last request
const OTHERS_LANE = 0; // with `--page-others none`, all that other tenants do

export class Recording {
  constructor({ live = false } = {}) {
    this.live = live;
    this.hello = null; // the newest
    this.lanes = []; // by arrival
    this.steps = []; // by their end
    this.marks = []; // {at, text}: a restart, steps that are not known
    this.totals = null;
    this.workers = []; // names
    this.blocks = new BlockHistory();
    this.events = []; // as they came; a saved recording is made of them
    this.zero = 0; // the moment that the time line calls 0
    this.end = 0; // the last moment that is known
    this.begun = false;
    this.shift = 0; // from the clock of the engine that is heard to this recording's
    this.epoch = 0; // engines so far: each one numbers its lanes anew
    this.byNumber = new Map(); // of this epoch
    this.names = new Map(); // request id: what this browser calls it
    this.rowEnds = []; // for each row of the time line its last lane
    this.paces = []; // {at, target}
  }

  /** The first moment that is known. */
  get begin() {
    return this.zero;
  }

  /** The gap in ms that running answers keep, as it was last said; 0 is off. */
  get target() {
    return this.paces.at(-1)?.target ?? 0;
  }

  /** Add an event of the feed, as an object; those that are not known are skipped. */
  add(event) {
    const readers = { hello: this.addHello, lane: this.addLane, steps: this.addSteps, blocks: this.addBlocks, totals: this.addTotals, pace: this.addPace, lost: this.addLost };
    const reader = readers[event.event];
    if (!reader || (event.event !== "hello" && this.hello === null)) return;
    this.events.push(event);
    reader.call(this, event);
    if (this.live) this.trim();
  }

  addHello(hello) {
    const first = this.hello === null;
    const restarted = !first && hello.boot !== this.hello.boot;
    if (first) this.origin = hello.origin;
    else {
      this.shift = hello.origin - this.origin;
      this.mark(Math.max(this.end, hello.t + this.shift), restarted ? "restarted" : "not watched");
    }
    const existing = new Set(hello.lanes.map((lane) => lane.lane));
    for (const [number, lane] of this.byNumber) {
      if (lane.end < Infinity || (!restarted && existing.has(number))) continue;
      lane.cutShort = true;
      lane.close(this.end, restarted ? "the engine was restarted" : "ended while this page did not watch");
    }
    if (restarted || first) {
      this.epoch += 1;
      this.byNumber = new Map();
    }
    this.hello = hello;
    this.workers = hello.workers.map((worker) => worker.id);
    this.paces.push({ at: hello.t + this.shift, target: hello.itl_slo_ms ?? 0 });
    this.blocks.reset(hello.t + this.shift, hello.workers.map((worker) => worker.num_blocks ?? 0));
    if (first) {
      // Requests that exist already began before; the time line starts where they can be seen.
      this.zero = hello.lanes.length ? Math.min(hello.t, ...hello.lanes.map((lane) => lane.arrival ?? lane.at)) : hello.t;
      this.end = hello.t;
    }
    for (const lane of hello.lanes) this.addLane({ ...lane, t: hello.t });
  }

  addLane(event) {
    const known = this.byNumber.get(event.lane);
    const at = (event.at ?? event.t) + this.shift;
    const lane = known ?? this.newLane(event, at);
    lane.prompt = event.prompt ?? lane.prompt;
    lane.cached = event.cached ?? lane.cached;
    lane.miss = event.miss === undefined ? lane.miss : event.miss;
    lane.why = event.why ?? lane.why;
    lane.route = event.route ?? lane.route;
    if (event.worker !== undefined) lane.worker = event.worker;
    if (event.eta_ms !== undefined) lane.eta = { at: event.t + this.shift, ms: event.eta_ms };
    if (event.transfer?.end !== undefined) lane.transfer = { ...event.transfer, start: event.transfer.start + this.shift, end: event.transfer.end + this.shift };
    if (event.output !== undefined) lane.resume(event.done ?? 0, event.output, at);
    if (event.state === "running" || event.state === "transfer") lane.letIn(at);
    if (event.cached !== undefined) lane.done = Math.max(lane.done, lane.cached);
    if (event.state === "preempted") lane.preempt(at);
    lane.timings = event.timings ?? lane.timings;
    if (event.state === "ended") {
      lane.cutShort ||= event.finish === null || event.finish === "abort" || event.finish === "error";
      lane.close(at, event.finish ?? "the engine died");
    }
    this.end = Math.max(this.end, at);
  }

  newLane(event, at) {
    const lane = new Lane(`${this.epoch}:${event.lane}`, event.arrival === undefined ? at : event.arrival + this.shift);
    lane.queuedAt(at);
    lane.own = event.own === true;
    lane.id = event.id ?? "";
    lane.name = this.names.get(lane.id) ?? "";
    lane.row = this.freeRow(lane);
    this.byNumber.set(event.lane, lane);
    this.lanes.push(lane);
    return lane;
  }

  /** The first row of the time line whose last request ended long enough ago. */
  freeRow(lane) {
    const free = this.rowEnds.findIndex((last) => last.end + ROW_REUSE_MS < lane.at);
    const row = free < 0 ? this.rowEnds.length : free;
    this.rowEnds[row] = lane;
    return row;
  }

  addSteps(event) {
    event.start.forEach((start, i) => {
      const decodeMs = event.decode_ms[i];
      const ms = event.duration_ms[i];
      const prefill = event.pre[i].map(([number, tokens, own, gave]) => ({ lane: this.laneNumbered(number), tokens, own: own ?? ms, gave }));
      const decode = event.dec[i].map(([number, tokens, drafted = 0]) => ({ lane: this.laneNumbered(number), tokens, drafted }));
      const step = {
        index: event.first + i,
        worker: event.worker,
        start: start + this.shift,
        end: start + this.shift + ms,
        ms,
        predicted: event.predicted_ms?.[i] ?? 0,
        share: prefill.length && ms > 0 ? Math.min(1, Math.max(0, (ms - decodeMs) / ms)) : 0,
        decodeMs,
        bookkeeping: event.bookkeeping_ms?.[i] ?? 0,
        flops: { prefill: event.prefill_flops?.[i] ?? 0, decode: event.decode_flops?.[i] ?? 0 },
        bytes: { prefill: event.prefill_bytes?.[i] ?? 0, decode: event.decode_bytes?.[i] ?? 0 },
        running: event.running?.[i] ?? 0,
        waiting: event.waiting?.[i] ?? 0,
        prefill,
        decode,
        tokens: prefill.reduce((sum, one) => sum + one.tokens, 0), // of prompts
        rows: decode.reduce((sum, one) => sum + 1 + one.drafted, 0),
      };
      this.insertStep(step);
      for (const { lane, tokens, own, gave } of prefill) lane.addChunk(step, tokens, own, gave);
      for (const { lane, tokens, drafted } of decode) lane.addTick(step, tokens, drafted);
      this.end = Math.max(this.end, step.end);
    });
  }

  /** Steps of several workers come in turns: each is put where its end belongs. */
  insertStep(step) {
    let at = this.steps.length;
    while (at > 0 && this.steps[at - 1].end > step.end) at -= 1;
    this.steps.splice(at, 0, step);
  }

  /** A lane by its number; the sum of others' requests is one that no event introduces. */
  laneNumbered(number) {
    const lane = this.byNumber.get(number);
    if (lane) return lane;
    const others = this.newLane({ lane: number, own: false }, this.end);
    others.isSum = number === OTHERS_LANE;
    return others;
  }

  addBlocks(event) {
    const holders = event.lanes.map(([number, kept, ranges]) => [this.laneNumbered(number), kept, ranges]);
    this.blocks.add({ ...event, at: Math.max(this.stepsEnd(event.worker), this.blocks.lastAt), lanes: holders });
  }

  /** The end of a worker's last step. */
  stepsEnd(worker) {
    return this.steps.findLast((step) => step.worker === worker)?.end ?? this.end;
  }

  addTotals(event) {
    this.totals = event;
    for (const worker of (event.workers ?? []).slice(this.workers.length)) this.workers.push(worker.id);
  }

  addPace(event) {
    this.paces.push({ at: event.at + this.shift, target: event.itl_slo_ms ?? 0 });
  }

  addLost(event) {
    this.mark(event.t + this.shift, `${event.steps.toLocaleString("en")} steps are not shown`);
  }

  mark(at, text) {
    this.marks.push({ at, text });
    this.end = Math.max(this.end, at);
  }

  /* Questions of the views */

  /** The lane of one of this key's requests; of several answers, the first. */
  laneOf(id) {
    return this.lanes.findLast((lane) => lane.id === id || lane.id === `${id}-0`) ?? null;
  }

  /** What this browser calls a request. */
  nameRequest(id, name) {
    this.names.set(id, name);
    const lane = this.laneOf(id);
    if (lane) lane.name = name;
    else this.names.set(`${id}-0`, name);
  }

  /** Steps that overlap a span of time, in order. */
  stepsBetween(from, to) {
    let low = 0;
    let high = this.steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.steps[middle].end < from) low = middle + 1;
      else high = middle;
    }
    let last = low;
    while (last < this.steps.length && this.steps[last].start <= to) last += 1;
    return this.steps.slice(low, last);
  }

  /** The last step that had begun at a moment. */
  stepAt(t) {
    return this.steps.findLast((step) => step.start <= t);
  }

  /** How many requests are in which phase at a moment. */
  countsAt(t) {
    const counts = { [PHASE.none]: 0, [PHASE.queued]: 0, [PHASE.prefill]: 0, [PHASE.decode]: 0, [PHASE.done]: 0 };
    for (const lane of this.lanes) if (!lane.isSum) counts[lane.phaseAt(t)] += 1;
    return counts;
  }

  /* A live page forgets */

  trim() {
    const horizon = this.end - KEPT_MS;
    if (horizon - this.zero < TRIM_EVERY_MS) return;
    const { hello } = this;
    const alive = this.lanes.filter((lane) => lane.end > horizon);
    const kept = this.events.filter((event) => event.event !== "hello" && event.t + this.shift > horizon);
    const blocks = this.blocks.forget(horizon, (lane) => this.numberOf(lane));
    // What is kept begins with a `hello` that knows what there was at that moment.
    const existing = alive.filter((lane) => lane.at <= horizon).map((lane) => this.described(lane, horizon));
    const t = horizon - this.shift;
    this.events = [{ ...hello, t, lanes: existing.filter(({ lane }) => lane !== undefined) }, ...blocks.map((one) => ({ ...one, t })), ...kept];
    this.lanes = alive;
    this.steps = this.steps.filter((step) => step.end > horizon);
    this.marks = this.marks.filter((mark) => mark.at > horizon);
    this.zero = horizon;
  }

  numberOf(wanted) {
    for (const [number, lane] of this.byNumber) if (lane === wanted) return number;
    return undefined;
  }

  /** A lane as `hello.lanes` describes it. */
  described(lane, t) {
    const queued = lane.phaseAt(t) === PHASE.queued;
    const found = { lane: this.numberOf(lane), at: lane.at - this.shift, own: lane.own, prompt: lane.prompt, state: queued ? "queued" : "running" };
    if (lane.id) Object.assign(found, { id: lane.id, arrival: lane.at - this.shift });
    if (!queued) Object.assign(found, { cached: lane.cached, done: lane.readAt(t), output: lane.writtenAt(t) });
    return found;
  }
}

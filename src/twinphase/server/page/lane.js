// One request: when it waited, its chunks of prefill, its ticks of decode.
//
// Times are milliseconds on one clock. A chunk or a tick knows its step, so that an answer's gap can
// name the prompt that made it longer. Lanes come from the feed, or from what is at hand without it:
// an answer's own stream, a timeline, a conversation that was kept.

/** What a request is doing at a moment. */
export const PHASE = { none: "none", queued: "queued", prefill: "prefill", decode: "decode", done: "done" };

export class Lane {
  /**
   * @param {number} key unique within a recording
   * @param {number} at when the request was queued
   */
  constructor(key, at) {
    this.key = key;
    this.at = at;
    this.own = false; // whether this page may know more than the load
    this.id = ""; // of an own request
    this.name = ""; // what this browser calls it; no feed has it
    this.prompt = 0; // tokens
    this.cached = 0;
    this.miss = null; // why no more was cached: {reason, token_index, part}
    this.why = ""; // what held it back
    this.worker = "";
    this.transfer = null; // {start, end, blocks}
    this.preempted = 0;
    this.finish = "";
    this.timings = null;
    this.cutShort = false; // its end was not the answer's own
    this.route = ""; // why that worker
    this.row = 0; // of the time line
    this.isSum = false; // all that other tenants do, as one
    this.eta = null; // {at, ms}: the server's estimate of its first token
    this.explanation = null;
    this.waits = []; // [from, to]
    this.chunks = []; // {start, end, tokens, from, own, step}
    this.ticks = []; // {start, end, tokens, drafted, stall, step}: a tick's start is the one before's end
    this.begun = Infinity; // its first step
    this.first = Infinity; // its first token
    this.end = Infinity;
    this.done = 0; // prompt tokens computed or cached so far
    this.before = 0; // tokens that were written before this recording began
  }

  get written() {
    return this.ticks.reduce((sum, tick) => sum + tick.tokens, this.before + (this.first < Infinity && !this.before ? 1 : 0));
  }

  queuedAt(at) {
    this.waits.push([at, Infinity]);
  }

  /** It leaves the queue. */
  letIn(at) {
    const wait = this.waits.at(-1);
    if (wait && wait[1] === Infinity) wait[1] = Math.max(wait[0], at);
    this.begun = Math.min(this.begun, at);
  }

  /** It was preempted: what it had is gone, and it waits again. */
  preempt(at) {
    this.preempted += 1;
    this.queuedAt(at);
    this.done = 0;
  }

  /** The recording begins, or goes on, when it had come so far. */
  resume(done, output, at) {
    this.done = done;
    if (output === 0) return;
    this.before += Math.max(0, output - this.written);
    this.first = Math.min(this.first, at);
  }

  /**
   * A step computed a chunk of its prompt, or of what it has to compute again.
   *
   * @param own ms that the step would have taken for this chunk alone; the rest went to others
   * @param gave whether the step also gave a token of the answer
   */
  addChunk(step, tokens, own, gave) {
    this.letIn(step.start);
    const from = this.done;
    this.done += tokens;
    this.chunks.push({ start: step.start, end: step.end, tokens, from, own: Math.min(own, step.ms), step });
    if (!gave) return;
    if (this.first === Infinity) this.first = step.end;
    else if (this.preempted) this.addTick(step, 1, 0);
  }

  /** A step wrote tokens: one, and the drafts that were right. */
  addTick(step, tokens, drafted) {
    this.letIn(step.start);
    if (this.first === Infinity) this.first = step.start; // the recording began after its first token
    const start = this.ticks.at(-1)?.end ?? Math.min(this.first, step.start);
    const stall = step.prefill.some(({ lane }) => lane !== this) ? step.ms - step.decodeMs : 0;
    this.ticks.push({ start, end: step.end, tokens, drafted, stall, step });
  }

  close(at, finish) {
    this.finish = finish;
    this.end = Math.max(at, this.ticks.at(-1)?.end ?? 0, this.chunks.at(-1)?.end ?? 0);
    const wait = this.waits.at(-1);
    if (wait && wait[1] === Infinity) wait[1] = this.end;
  }

  phaseAt(t) {
    if (t < this.at) return PHASE.none;
    if (t >= this.end) return PHASE.done;
    if (this.waits.some(([start, end]) => start <= t && t < end)) return PHASE.queued;
    return t < this.first ? PHASE.prefill : PHASE.decode;
  }

  /** Prompt tokens that are computed or cached at a moment. */
  readAt(t) {
    const last = this.chunks.findLast((chunk) => chunk.end <= t);
    const known = this.begun <= t ? this.cached : 0;
    return Math.min(this.prompt, Math.max(known, last ? last.from + last.tokens : 0));
  }

  /** Tokens of the answer at a moment. */
  writtenAt(t) {
    if (t < this.first) return 0;
    return this.ticks.reduce((sum, tick) => (tick.end <= t ? sum + tick.tokens : sum), Math.max(1, this.before));
  }

  /** Milliseconds per token so far; null before the second one. */
  paceAt(t) {
    const tokens = this.writtenAt(t);
    const last = this.ticks.findLast((tick) => tick.end <= t);
    return last && tokens > 1 ? (last.end - this.first) / (tokens - 1) : null;
  }

  /** Milliseconds until its first token: the server's estimate, or the pace so far; null is unknown. */
  etaAt(t) {
    if (this.eta && this.eta.at <= t) return Math.max(0, this.eta.at + this.eta.ms - t);
    const last = this.chunks.findLast((chunk) => chunk.end <= t);
    if (last === undefined || t >= this.first) return null;
    const computed = last.from + last.tokens - this.cached;
    if (computed <= 0) return null;
    const perToken = (last.end - this.begun) / computed;
    return Math.max(0, (this.prompt - last.from - last.tokens) * perToken - (t - last.end));
  }

  /** Gaps that prompts of others made longer: which, how long in all, whose tokens; the longest gap. */
  stallsAt(t) {
    const ticks = this.ticks.filter((tick) => tick.end <= t);
    const stalled = ticks.filter((tick) => tick.stall > 0);
    const tokens = new Map(); // by lane
    for (const { step } of stalled) {
      for (const { lane, tokens: count } of step.prefill) tokens.set(lane, (tokens.get(lane) ?? 0) + count);
    }
    return {
      count: stalled.length,
      ms: stalled.reduce((sum, tick) => sum + tick.stall, 0),
      causes: [...tokens].sort((a, b) => b[1] - a[1]), // [lane, prompt tokens]
      longest: Math.max(0, ...ticks.map((tick) => tick.end - tick.start)),
    };
  }

  /** Drafted tokens, and those of them that were right. */
  draftsAt(t) {
    const ticks = this.ticks.filter((tick) => tick.end <= t);
    return {
      drafted: ticks.reduce((sum, tick) => sum + tick.drafted, 0),
      accepted: ticks.reduce((sum, tick) => sum + tick.tokens - 1, 0),
    };
  }
}

/**
 * A lane that grows with an answer's stream, for pages that have no feed. It begins when the question
 * was sent, `at` on the caller's clock, so that the way over the network is in it.
 */
export function laneOfStream(at = 0) {
  const lane = new Lane(-1, at);
  lane.own = true;
  lane.queuedAt(at);
  const steps = [];
  const add = (start, end, prefill, decode) => {
    const tokens = prefill.reduce((sum, one) => sum + one.tokens, 0);
    const ms = end - start;
    steps.push({ start, end, ms, decodeMs: prefill.length ? 0 : ms, share: prefill.length ? 1 : 0, tokens, prefill, decode });
    return steps.at(-1);
  };
  return {
    lane,
    steps,
    progress({ total, cache, processed, time_ms: sinceArrival }) {
      const end = at + sinceArrival;
      lane.prompt = total;
      lane.cached = cache;
      lane.done = Math.max(lane.done, cache);
      const tokens = processed - lane.done;
      if (tokens <= 0) return;
      const start = lane.chunks.at(-1)?.end ?? at;
      lane.addChunk(add(start, end, [{ lane, tokens }], []), tokens, end - start, processed === total);
    },
    wrote(end, tokens) {
      if (tokens === 0) return;
      const start = lane.ticks.at(-1)?.end ?? lane.first;
      if (start === Infinity || lane.firstWritten === undefined) {
        // The first token comes with the prompt's last step.
        lane.firstWritten = end;
        lane.first = end;
        lane.letIn(lane.chunks.at(-1)?.end ?? end);
        return;
      }
      lane.addTick(add(start, Math.max(end, start), [], [{ lane, tokens, drafted: tokens - 1 }]), tokens, tokens - 1);
    },
    close(end) {
      lane.close(end, "");
    },
  };
}

const PREFILL = new Set(["prefill", "recompute"]);
const DECODE = new Set(["drafting", "decode", "rejected", "batching", "stall"]);

/** A finished request's lane from GET /v1/requests/{id}/timeline; times in ms since its arrival. */
export function laneFromTimeline(timeline) {
  const lane = new Lane(-2, 0);
  const { request, token_times_ms: times } = timeline;
  lane.own = true;
  lane.id = timeline.id;
  lane.prompt = request.num_prompt_tokens;
  lane.cached = request.num_cached_tokens;
  lane.waits = timeline.intervals.filter((one) => one.kind === "queue").map((one) => [one.start_ms, one.end_ms]);
  const step = { prefill: [], decode: [], share: 1, tokens: 0 };
  for (const { kind, start_ms: start, end_ms: end } of timeline.intervals) {
    if (PREFILL.has(kind)) lane.chunks.push({ start, end, tokens: 0, from: 0, own: end - start, step });
    if (lane.begun === Infinity && (PREFILL.has(kind) || DECODE.has(kind))) lane.begun = start;
  }
  if (lane.begun === Infinity || times.length === 0) return null;
  lane.first = times[0];
  const stalls = timeline.intervals.filter((one) => one.kind === "stall");
  const moments = [...new Set(times.slice(1))];
  lane.ticks = moments.map((end, i) => {
    const start = moments[i - 1] ?? lane.first;
    const stall = stalls.reduce((sum, one) => sum + Math.max(0, Math.min(end, one.end_ms) - Math.max(start, one.start_ms)), 0);
    return { start, end, tokens: times.filter((time) => time === end).length, drafted: 0, stall, step };
  });
  lane.end = timeline.e2e_ms;
  return lane;
}

/** What is drawn of a lane, as plain values that a conversation keeps. */
export function excerptOf({ lane, steps, target }) {
  const others = [];
  const reference = (other) => {
    if (other === lane) return -1;
    const known = others.findIndex((one) => one.lane === other);
    return known >= 0 ? known : others.push({ lane: other, name: other.name, own: other.own, id: other.id }) - 1;
  };
  const lived = steps.filter((step) => step.end > lane.at && step.start < lane.end && (step.prefill.length || step.decode.some((one) => one.lane === lane)));
  const places = new Map(lived.map((step, i) => [step, i]));
  return {
    target,
    lane: { ...pick(lane, SCALARS), waits: lane.waits },
    steps: lived.map((step) => [step.start, step.end, step.share, step.prefill.map((one) => [reference(one.lane), one.tokens])]),
    chunks: lane.chunks.map(({ tokens, from, own, step }) => [places.get(step) ?? -1, tokens, from, own]),
    ticks: lane.ticks.map(({ start, tokens, drafted, stall, step }) => [places.get(step) ?? -1, start, tokens, drafted, stall]),
    others: others.map(({ name, own, id }) => ({ name, own, id })),
  };
}

const SCALARS = ["at", "own", "id", "name", "prompt", "cached", "begun", "first", "end", "cutShort"];
const pick = (from, names) => Object.fromEntries(names.map((name) => [name, from[name]]));

/** The source of a picture from `excerptOf`; without one nothing is drawn. */
export function thawed(excerpt) {
  if (!excerpt) return { lane: null, steps: [], target: 0 };
  const lane = Object.assign(new Lane(-3, excerpt.lane.at), excerpt.lane);
  // JSON writes Infinity as null.
  for (const name of ["begun", "first", "end"]) lane[name] ??= Infinity;
  const others = excerpt.others.map((other, i) => Object.assign(new Lane(-4 - i, 0), other));
  const steps = excerpt.steps.map(([start, end, share, prefill]) => ({
    start,
    end,
    ms: end - start,
    decodeMs: (end - start) * (1 - share),
    share,
    prefill: prefill.map(([reference, tokens]) => ({ lane: reference < 0 ? lane : others[reference], tokens })),
    tokens: prefill.reduce((sum, [, tokens]) => sum + tokens, 0),
    decode: [],
  }));
  lane.chunks = excerpt.chunks
    .filter(([place]) => place >= 0)
    .map(([place, tokens, from, own]) => ({ start: steps[place].start, end: steps[place].end, tokens, from, own, step: steps[place] }));
  lane.ticks = excerpt.ticks
    .filter(([place]) => place >= 0)
    .map(([place, start, tokens, drafted, stall]) => ({ start, end: steps[place].end, tokens, drafted, stall, step: steps[place] }));
  return { lane, steps, target: excerpt.target };
}

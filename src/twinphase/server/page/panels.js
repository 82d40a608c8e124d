// Beside and below the time line: a chosen request or step; KV blocks, the prefix cache, the queue,
// workers and the roofline at a moment.

import { byId, element, listed, measured, ms, number, percent, plural, put, sheet } from "./dom.js";
import { drawBlocks, drawRoof } from "./draw.js";
import { fall, levers } from "./figures.js";
import { PHASE } from "./lane.js";
import { named, titleOf } from "./turn.js";

const TRAIL_STEPS = 14;
const TRAIL_MS = 4000;
const MISSES = {
  never_seen: "nothing like it was seen",
  diverged: "the rest is new",
  salt: "another salt or key",
  block_granularity: "the rest is less than a block",
  evicted: "more was cached once, and evicted",
  no_snapshot: "no recurrent state was kept there",
};
export const missWords = (reason) => MISSES[reason] ?? String(reason).replaceAll("_", " ");

const HELD_BACK = { seats: "for a seat", blocks: "for KV blocks", budget: "for its turn", states: "for a slot of recurrent state", prefix: "for a prefix that another computes" };

export class Panels {
  constructor() {
    this.view = null;
    this.rates = { prefill: [], decode: [] };
    this.paintBlocks = sheet(byId("kv"), (context, width, height) => {
      const state = this.view && this.blocks()?.state;
      if (state?.length) drawBlocks(context, width, height, state, this.view.t);
    });
    this.paintRoof = sheet(byId("roof"), (context, width, height) => {
      if (this.view) drawRoof(context, width, height, roofOf(this.view.recording.hello), this.rates);
    });
  }

  /** Show everything as it is at a moment. */
  show(recording, t, live) {
    this.view = { recording, t, live };
    this.rates = trailsAt(recording, t);
    this.paintBlocks();
    this.paintRoof();
    this.sayBlocks();
    this.sayRoof();
    this.sayPrefixes();
    this.sayQueue();
    this.sayWorkers();
  }

  /** The blocks of the worker whose step was the last, or of the first one. */
  blocks() {
    const { recording, t } = this.view;
    const worker = recording.steps.length ? (recording.stepAt(t)?.worker ?? 0) : 0;
    return recording.blocks.at(t, worker);
  }

  sayBlocks() {
    const map = this.blocks();
    const counts = map?.counts;
    let words = "No block was reported yet.";
    if (counts) {
      const total = counts.held + counts.cached + counts.free;
      const shared = counts.shared ? ` (${number(counts.shared)} shared, with a dot)` : "";
      words = `${number(counts.held)} held${shared}, ${number(counts.cached)} cached, ${number(counts.free)} free, of ${number(total)}. The colour is what their request is doing.`;
    }
    put(byId("kv-says"), words);
    byId("kv").setAttribute("aria-label", words);
  }

  sayRoof() {
    const rate = (phase) => {
      const last = this.rates[phase].at(-1);
      return last ? `${number(last.y)} GFLOP/s` : "none now";
    };
    const roof = roofOf(this.view.recording.hello);
    const words = element("span", {}, element("b", { className: "p" }, "Prefill "), rate("prefill"), ", ", element("b", { className: "d" }, "decode "), rate("decode"), ". FLOP per byte to the right.", roof ? "" : " The machine's ceilings are not measured yet.");
    if (byId("roof-says").textContent === words.textContent) return;
    byId("roof-says").replaceChildren(words);
    byId("roof").setAttribute("aria-label", words.textContent);
  }

  sayPrefixes() {
    const { recording, t } = this.view;
    const seen = recording.lanes.filter((lane) => lane.begun <= t && lane.prompt);
    const asked = seen.reduce((sum, lane) => sum + lane.prompt, 0);
    const hit = seen.reduce((sum, lane) => sum + lane.cached, 0);
    const words = asked ? ` of ${number(asked)} prompt tokens were cached.` : "No prompt yet.";
    const line = byId("hits");
    const text = asked ? `${percent(hit / asked)}${words}` : words;
    if (line.textContent !== text) line.replaceChildren(...(asked ? [element("b", { className: "p" }, percent(hit / asked)), words] : [words]));
    const reasons = new Map();
    for (const { miss } of seen) if (miss?.reason) reasons.set(miss.reason, (reasons.get(miss.reason) ?? 0) + 1);
    fill(byId("misses"), [...reasons].sort((a, b) => b[1] - a[1]).map(([reason, count]) => [String(count), missWords(reason)]));
  }

  sayQueue() {
    const { recording, t } = this.view;
    const queued = recording.lanes.filter((lane) => lane.phaseAt(t) === PHASE.queued);
    byId("queue-title").hidden = queued.length === 0;
    const rows = queued.slice(0, 5).map((lane) => {
      const eta = lane.etaAt(t);
      const why = HELD_BACK[lane.why] ? ` ${HELD_BACK[lane.why]}` : "";
      const expected = eta === null ? "its start is not known" : `first token in about ${ms(eta)}`;
      return [ms(t - lane.waits.at(-1)[0]), `waits${why}: ${expected}`];
    });
    if (queued.length > 5) rows.push([`+ ${queued.length - 5}`, "more"]);
    fill(byId("queue"), rows);
  }

  sayWorkers() {
    const { recording, t } = this.view;
    const several = recording.workers.length > 1;
    byId("workers-title").hidden = !several;
    if (!several) return fill(byId("workers"), []);
    const moved = recording.lanes.filter((lane) => lane.transfer && lane.transfer.start <= t && lane.transfer.end > t - 3000);
    const known = recording.totals?.workers ?? recording.hello.workers;
    const rows = known.map((worker) => [worker.id, [worker.role, worker.state, worker.running === undefined ? "" : `${plural(worker.running, "request")} running`].filter(Boolean).join(", ")]);
    for (const { transfer } of moved) rows.push([ms(transfer.end - transfer.start), `${plural(transfer.blocks ?? 0, "block")} moved`]);
    return fill(byId("workers"), rows);
  }
}

/** Rows of a definition list, only where they have changed. */
function fill(list, rows) {
  const key = JSON.stringify(rows);
  if (list.dataset.rows === key) return;
  list.dataset.rows = key;
  list.replaceChildren(...rows.flatMap(([term, words]) => [element("dt", {}, term), element("dd", {}, words)]));
}

/** The machine's ceilings for this model's weights, or null: the peak of its units, the bandwidth. */
function roofOf(hello) {
  const ceilings = hello?.ceilings;
  const peak = ceilings?.int8_ops ?? ceilings?.bfloat16_flops ?? ceilings?.float16_flops ?? ceilings?.float32_flops;
  const bandwidth = ceilings?.bandwidth?.at(-1)?.[1];
  return peak && bandwidth ? { gflops: peak / 1e9, gbytes: bandwidth / 1e9 } : null;
}

/** The last steps of each phase as points under the roofline. */
function trailsAt(recording, t) {
  const trails = { prefill: [], decode: [] };
  for (const step of recording.stepsBetween(t - TRAIL_MS, t)) {
    if (step.end > t) continue;
    const times = { prefill: step.ms * step.share, decode: step.ms * (1 - step.share) };
    for (const phase of ["prefill", "decode"]) {
      const flops = step.flops[phase];
      const bytes = step.bytes[phase];
      if (flops > 0 && bytes > 0 && times[phase] > 0) trails[phase].push({ x: flops / bytes, y: flops / times[phase] / 1e6 });
    }
  }
  return { prefill: trails.prefill.slice(-TRAIL_STEPS), decode: trails.decode.slice(-TRAIL_STEPS) };
}

function heading(text, close) {
  return element("header", {}, element("h2", {}, text), element("button", { type: "button", className: "quiet", "aria-label": "Close details", onclick: close }, "✕"));
}

/** A request: headline, ledger, what was cached, what held it up, what would make it faster. */
export function laneDetails(lane, recording, close) {
  const { timings } = lane;
  const ttft = timings ? timings.ttft_ms : lane.first < Infinity ? round(lane.first - lane.at) : null;
  const tpot = timings ? timings.tpot_ms : round(lane.paceAt(Infinity));
  const nodes = [heading(titleOf(lane), close)];
  const headline = element("p", {}, ...(ttft === null ? ["No token yet."] : ["First token after ", measured(ttft, "p"), tpot === null ? "." : ", then ", tpot === null ? "" : measured(tpot, "d"), tpot === null ? "" : " per token."]));
  nodes.push(headline);
  if (!lane.own) {
    const what = lane.isSum ? "What all other keys ask, as one" : "Another key's request";
    nodes.push(element("p", { className: "muted" }, `${what}: its load is shown, ${number(lane.prompt)} prompt tokens and ${number(lane.written)} written, and nothing of what it says.`));
  }
  if (timings?.ledger_ms) nodes.push(fall(timings.ledger_ms));
  nodes.push(element("p", {}, listedSentences(lane)));
  if (lane.route) nodes.push(element("p", { className: "muted" }, `Routed to ${recording.workers[lane.worker] ?? "a worker"}: ${lane.route}`));
  if (lane.transfer) nodes.push(element("p", { className: "muted" }, `${plural(lane.transfer.stored ?? lane.transfer.blocks ?? 0, "block")} moved to another worker in ${ms(lane.transfer.end - lane.transfer.start)}.`));
  if (lane.finish && lane.cutShort) nodes.push(element("p", {}, `It ended early: ${lane.finish}.`));
  if (lane.explanation?.levers.length) nodes.push(element("div", {}, element("h2", {}, "What would make it faster"), levers(lane.explanation.levers)));
  const sentence = ttft === null ? `${titleOf(lane)}: no token yet.` : `${titleOf(lane)}: first token after ${ms(ttft)}${tpot === null ? "" : `, then ${ms(tpot)} per token`}.`;
  return { nodes, sentence };
}

const round = (value) => (value === null ? null : Math.round(value * 1000) / 1000);

function listedSentences(lane) {
  const sentences = [];
  if (lane.begun < Infinity) {
    const miss = lane.miss ? `; ${missWords(lane.miss.reason)}${lane.miss.part ? `, from the ${lane.miss.part} on` : ""}` : "";
    sentences.push(`${number(lane.cached)} of ${plural(lane.prompt, "prompt token")} were cached${miss}.`);
  }
  const stalls = lane.stallsAt(Infinity);
  if (stalls.ms > 0) {
    const causes = stalls.causes.map(([other, tokens]) => `${named(other)} (${plural(tokens, "token")})`);
    sentences.push(`It was held up for ${ms(stalls.ms)} by ${listed(causes)}; its longest gap was ${ms(stalls.longest)}.`);
  }
  const { drafted, accepted } = lane.draftsAt(Infinity);
  if (drafted) sentences.push(`Of ${plural(drafted, "drafted token")} ${number(accepted)} were accepted.`);
  if (lane.preempted) sentences.push(`It was preempted ${lane.preempted === 1 ? "once" : plural(lane.preempted, "time")}.`);
  if (lane.why && lane.phaseAt(Infinity) !== PHASE.queued) sentences.push(`It waited for ${lane.why}.`);
  return sentences.join(" ");
}

/** A step: what it computed, for whom, and how long that took. */
export function stepDetails(step, recording, close) {
  const prefillMs = round(step.ms - step.decodeMs);
  const rows = (list, words) => element("ul", {}, list.map((one) => element("li", {}, `${titleOf(one.lane)}: ${words(one)}`)));
  const nodes = [heading(`Step ${number(step.index)}: ${ms(step.ms)}`, close)];
  const worker = recording.workers.length > 1 ? ` At ${recording.workers[step.worker]}.` : "";
  const target = recording.target ? `; the target is ${ms(recording.target)}` : "";
  nodes.push(element("p", {}, `Predicted ${step.predicted ? ms(step.predicted) : "?"}${target}.${worker}`));
  if (step.prefill.length) {
    nodes.push(element("div", {}, element("p", {}, element("b", { className: "p" }, "Prefill "), measured(prefillMs)), rows(step.prefill, (one) => plural(one.tokens, "token"))));
  }
  if (step.decode.length) {
    const words = (one) => plural(one.tokens, "token") + (one.drafted ? `, ${one.tokens - 1} of ${plural(one.drafted, "draft")} accepted` : "");
    nodes.push(element("div", {}, element("p", {}, element("b", { className: "d" }, "Decode "), measured(round(step.decodeMs))), rows(step.decode, words)));
  }
  if (step.prefill.length && step.decode.length) {
    nodes.push(element("p", { className: "muted" }, `Its blue part made ${step.decode.length === 1 ? "one answer" : `${step.decode.length} answers`} wait.`));
  }
  const sentence = `Step ${step.index}, ${ms(step.ms)}: ${plural(step.decode.length, "answer")}, ${plural(step.tokens, "prompt token")}.`;
  return { nodes, sentence };
}

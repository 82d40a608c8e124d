// A question and its answer: the text, two lanes of how it came about, and where the time went.
//
// Everything is drawn from a lane at a moment. While the answer comes the moment is now; afterwards
// the same lane can be replayed, slowly, from the same events.

import { AnswerView } from "./answer.js";
import { element, listed, measured, ms, number, plural, put, say, sheet } from "./dom.js";
import { drawGaps, drawPrompt } from "./draw.js";
import { boundSentence, fall, gauge, levers, promptParts } from "./figures.js";
import { PHASE } from "./lane.js";

const COLOURS = [
  ["by-draft", "Colour: accepted drafts"],
  ["by-gap", "Colour: gaps"],
  ["", "No colour"],
];

/** A lane's name where it stands by itself. */
export function titleOf(lane) {
  if (lane.isSum) return "other keys";
  return lane.name || (lane.own ? `Request ${lane.id.slice(-6)}` : "another key");
}

/** A lane's name in a sentence. */
export const named = (lane) => (lane.name ? `“${lane.name}”` : lane.own ? `request ${lane.id.slice(-6)}` : "another key");

export class TurnView {
  /**
   * @param turn `{question, files, answer, error, finish, timings, explanation}`
   * @param source what to draw: `{lane, steps, target, now}`; the first three may be null at first
   * @param actions `{edit, retry, answerCall}`
   */
  constructor(turn, source, actions) {
    this.turn = turn;
    this.source = source;
    this.actions = actions;
    this.finished = false;
    this.replay = null; // {at, speed, began} while the picture is drawn again
    this.answer = new AnswerView(turn.answer, actions.answerCall);
    this.prefill = phaseRow("Prefill", "p", "read");
    this.decode = phaseRow("Decode", "d", "written");
    put(this.decode.says, "begins with the first token");
    this.prefill.canvas.setAttribute("role", "progressbar");
    this.prefill.canvas.setAttribute("aria-label", "Prefill of the prompt");
    this.decode.canvas.setAttribute("role", "img");
    this.sheets = [
      sheet(this.prefill.canvas, (context, width, height) => {
        const { lane, steps } = this.source;
        if (lane) drawPrompt(context, width, height, lane, steps, this.moment);
      }),
      sheet(this.decode.canvas, (context, width, height) => {
        const { lane, target } = this.source;
        if (lane && lane.first <= this.moment) drawGaps(context, width, height, lane, target, this.moment);
      }),
    ];
    this.side = element("div", { className: "side" });
    this.ttft = bigNumber("p", this.side);
    this.tpot = bigNumber("d", this.side);
    this.report = element("div", { className: "why", hidden: true });
    this.problem = element("div", { className: "problem", hidden: true });
    this.lanes = element("div", {}, this.prefill.row, this.decode.row);
    this.element = element("article", { className: "turn" }, this.asked(), this.answer.element, this.problem, this.lanes, this.side, this.report);
  }

  asked() {
    const { question, files } = this.turn;
    const words = element("h2", {}, question, files.map((file) => element("span", { className: "file" }, `+ ${file.name}`)));
    const tools = element(
      "div",
      { className: "tools" },
      element("button", { type: "button", className: "quiet", onclick: () => this.edit() }, "Edit"),
      element("button", { type: "button", className: "quiet", onclick: () => this.actions.retry() }, "Retry"),
    );
    return element("div", { className: "asked" }, words, tools);
  }

  /** The question becomes a field; Enter asks it instead, Escape leaves it. */
  edit() {
    const area = element("textarea", { value: this.turn.question, "aria-label": "Edit the question", rows: 3 });
    const before = this.element.firstChild;
    const back = () => this.element.firstChild.replaceWith(before);
    area.onkeydown = (event) => {
      if (event.key === "Escape") {
        back();
        before.querySelector("button").focus();
      }
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.actions.edit(area.value);
    };
    before.replaceWith(element("div", { className: "asked" }, area));
    area.focus();
  }

  /** The moment of the picture on the lane's clock. */
  get moment() {
    const { lane } = this.source;
    if (this.replay && lane) return lane.at + (performance.now() - this.replay.began) * this.replay.speed;
    return this.finished ? Infinity : this.source.now();
  }

  get isMoving() {
    return !this.finished || this.replay !== null;
  }

  /** Draw everything as it is at this moment. */
  update() {
    const { lane } = this.source;
    const t = this.moment;
    if (this.replay && t > lane.end + 300) this.replay = null;
    this.showText(t);
    if (!lane) return;
    const phase = t === Infinity ? PHASE.done : lane.phaseAt(t);
    if (phase === PHASE.none || phase === PHASE.queued || phase === PHASE.prefill) this.sayPrefill(lane, phase, t);
    else this.sayBoth(lane, t);
    for (const paint of this.sheets) paint();
  }

  showText(t) {
    const { lane } = this.source;
    const { turn } = this;
    const settled = this.finished && !this.replay;
    const upto = this.replay ? lane.writtenAt(t) : Infinity;
    this.answer.show(upto, { colours: settled ? this.colours() : null, done: settled, thinkingMs: turn.timings?.ttfo_ms ?? null });
    if (settled) this.answer.live = "";
    else this.answer.live = turn.answer.tokens > 0 && upto > 0 ? "decode" : "prefill";
  }

  sayPrefill(lane, phase, t) {
    const read = lane.readAt(t);
    const share = lane.prompt ? read / lane.prompt : 0;
    const waits = phase === PHASE.queued;
    put(this.prefill.says, waits ? waitSentence(lane) : `${number(read)} of ${number(lane.prompt)} tokens`);
    put(this.prefill.end, lane.prompt ? `${Math.round(100 * share)} %` : "");
    put(this.ttft.value, ms(Math.max(0, t - lane.at)));
    const eta = lane.etaAt(t);
    put(this.ttft.says, eta === null ? (waits ? "waiting" : "computing the prompt") : `about ${ms(eta)} to the first token`);
    put(this.tpot.value, "");
    put(this.tpot.says, "");
    const cached = lane.cached ? `${plural(lane.cached, "token")} came from the cache. ` : "";
    const beside = lane.chunks.at(-1)?.step.decode.length ? "Chunks are small because answers are being written beside them." : "";
    put(this.prefill.note, cached + beside);
    this.sayProgress(share);
    put(this.decode.says, "begins with the first token");
    put(this.decode.end, "");
    put(this.decode.note, "");
  }

  sayProgress(share) {
    const { canvas, says } = this.prefill;
    canvas.setAttribute("aria-valuenow", Math.round(100 * share));
    canvas.setAttribute("aria-valuetext", says.textContent);
  }

  sayBoth(lane, t) {
    const { timings } = this.turn;
    put(this.prefill.says, `${number(lane.prompt)} tokens: ${number(lane.cached)} cached, ${number(lane.prompt - lane.cached)} computed in ${plural(lane.chunks.length, "chunk")}`);
    const ttft = this.finished && timings ? timings.ttft_ms : lane.first - lane.at;
    const tpot = this.finished && !this.replay && timings ? timings.tpot_ms : lane.paceAt(t);
    this.prefill.end.replaceChildren(measured(rounded(ttft)));
    this.ttft.value.replaceChildren(measured(rounded(ttft)));
    put(this.ttft.says, "to the first token");
    put(this.prefill.note, this.betweenSentence(lane));
    this.sayProgress(1);
    this.tpot.value.replaceChildren(tpot === null ? "" : measured(rounded(tpot)));
    put(this.tpot.says, tpot ? `per token after it: ${(1000 / tpot).toFixed(1)} tokens/s` : "");
    const stalls = lane.stallsAt(t);
    const { drafted, accepted } = lane.draftsAt(t);
    const written = this.finished && !this.replay && timings ? timings.predicted_n : lane.writtenAt(t);
    put(this.decode.says, plural(written, "token") + draftWords(timings?.draft_n ?? drafted, timings?.draft_n_accepted ?? accepted));
    put(this.decode.end, stalls.longest > 0 ? `longest gap ${ms(stalls.longest)}` : "");
    put(this.decode.note, stallSentence(stalls));
    this.decode.canvas.setAttribute("aria-label", `${this.decode.says.textContent}. ${this.decode.note.textContent}`);
  }

  betweenSentence(lane) {
    const others = new Map();
    for (const step of this.source.steps) {
      if (step.start < lane.begun || step.end > lane.first || step.prefill.some((one) => one.lane === lane)) continue;
      for (const { lane: other, tokens } of step.prefill) others.set(other, (others.get(other) ?? 0) + tokens);
    }
    if (others.size === 0) return "";
    const parts = [...others].map(([other, tokens]) => `${plural(tokens, "prompt token")} of ${named(other)}`);
    return `▲ In between, ${listed(parts)} were computed.`;
  }

  /** The answer is complete, stopped or failed: what is known now is shown for good. */
  finish({ quiet = false } = {}) {
    this.finished = true;
    this.replay = null;
    const { timings, error, finish } = this.turn;
    this.showProblem(error);
    this.update();
    this.lanes.hidden = !this.source.lane && !timings;
    if (timings) this.showReport();
    if (quiet) return;
    const ended = finish === "stopped" ? "Stopped" : finish === "length" ? "Answered up to its limit of tokens" : "Answered";
    if (error) say(error.message);
    else if (timings?.ttft_ms) say(`${ended}: first token after ${ms(timings.ttft_ms)}${timings.tpot_ms ? `, then ${ms(timings.tpot_ms)} per token` : ""}.`);
  }

  showProblem(error) {
    this.problem.hidden = !error;
    if (!error) return;
    const again = element("button", { type: "button", onclick: () => this.actions.retry() }, "Ask again");
    this.problem.replaceChildren(element("p", {}, error.message), again);
    if (!error.retryAfter) return;
    // The server says when asking again can succeed.
    const until = performance.now() + 1000 * error.retryAfter;
    const tick = () => {
      const seconds = Math.ceil((until - performance.now()) / 1000);
      again.disabled = seconds > 0;
      put(again, seconds > 0 ? `Ask again in ${seconds} s` : "Ask again");
      if (seconds > 0) setTimeout(tick, 250);
    };
    tick();
  }

  /** What the server measured, and what it explains. */
  showReport() {
    const { timings, explanation } = this.turn;
    this.ttft.value.replaceChildren(timings.ttft_ms === null ? "" : measured(timings.ttft_ms));
    this.tpot.value.replaceChildren(timings.tpot_ms === null ? "" : measured(timings.tpot_ms));
    this.showLimits(explanation);
    const select = element(
      "select",
      { "aria-label": "What colours the answer's tokens", onchange: () => (this.answer.body.className = `answer ${select.value}`) },
      COLOURS.map(([value, text]) => element("option", { value }, text)),
    );
    const again = (text, speed) => element("button", { type: "button", className: "quiet", onclick: () => this.startReplay(speed) }, text);
    const tools = this.source.lane ? element("div", { className: "tools" }, select, again("Replay", 1), again("Replay slowly", 0.25)) : null;
    const where = element("div", {}, element("h3", {}, `Where ${ms(timings.e2e_ms)} went`), fall(timings.ledger_ms));
    const faster = explanation?.levers.length ? element("div", {}, element("h3", {}, "What would make it faster"), levers(explanation.levers)) : null;
    const cost = timings.prompt_parts?.length ? element("div", {}, element("h3", {}, "What the prompt cost"), promptParts(timings.prompt_parts)) : null;
    this.report.replaceChildren(...[tools, where, faster, cost].filter(Boolean));
    this.report.hidden = false;
  }

  /** How near each phase came to the machine's limits. */
  showLimits(explanation) {
    this.side.querySelectorAll(".gauges, .limits").forEach((old) => old.remove());
    if (!explanation) return;
    const { efficiency, alone, bounds } = explanation;
    const gauges = element(
      "div",
      { className: "gauges" },
      gauge("MFU", efficiency?.prefill.mfu, "prefill", "of the arithmetic, in prefill"),
      gauge("MBU", efficiency?.decode.mbu, "decode", "of the bandwidth, in decode"),
    );
    this.side.append(gauges, element("p", { className: "muted limits" }, boundSentence(bounds), aloneSentence(alone)));
  }

  startReplay(speed) {
    this.replay = { speed, began: performance.now() };
    this.lanes.scrollIntoView({ block: "nearest" });
  }

  /** For each piece of the text whether its step accepted drafts, and how long the gap before it was. */
  colours() {
    if (this.colouring) return this.colouring;
    const { lane } = this.source;
    if (!lane) return null;
    const worst = Math.max(1, ...lane.ticks.map((tick) => tick.end - tick.start));
    let count = 1;
    const ticks = lane.ticks.map((tick) => ({ tick, upto: (count += tick.tokens) }));
    this.colouring = (piece) => {
      const found = piece.upto > 1 ? ticks.find((one) => one.upto >= piece.upto) : undefined;
      if (found === undefined) return { free: false, gap: 0 };
      return { free: found.tick.tokens > 1, gap: (found.tick.end - found.tick.start) / worst };
    };
    return this.colouring;
  }

  remove() {
    for (const paint of this.sheets) paint.forget();
    this.element.remove();
  }
}

function phaseRow(name, colour, canvasClass) {
  const says = element("span", { className: "says" });
  const end = element("b", { className: `end ${colour}` });
  const note = element("p", { className: "note" });
  const canvas = element("canvas", { className: canvasClass });
  const row = element("div", { className: "lane" }, element("b", { className: colour }, name), says, end, canvas, note);
  return { row, says, end, note, canvas };
}

function bigNumber(colour, side) {
  const value = element("p", { className: `big ${colour}` });
  const says = element("p", { className: "muted" });
  side.append(element("div", {}, value, says));
  return { value, says };
}

/** The feed's times have a tenth of a millisecond, the server's own three decimals; no more is shown. */
const rounded = (value) => Math.round(value * 1000) / 1000;

function draftWords(drafted, accepted) {
  if (drafted > accepted) return `; of ${number(drafted)} drafted, ${number(accepted)} were accepted`;
  return accepted ? `; ${number(accepted)} of them were accepted drafts` : "";
}

function waitSentence(lane) {
  const reasons = { seats: "waits for a seat", blocks: "waits for KV blocks", budget: "waits for its turn", states: "waits for a slot of recurrent state", prefix: "waits for a prefix that another request computes" };
  return reasons[lane.why] ?? "waits";
}

function stallSentence(stalls) {
  if (stalls.count === 0) return "One bar per step: as wide and as high as the gap it made.";
  const causes = stalls.causes.map(([lane, tokens]) => `${plural(tokens, "prompt token")} of ${named(lane)}`);
  return `Blue: ${plural(stalls.count, "gap")} held up for ${ms(stalls.ms)} in all, by ${listed(causes)}.`;
}

function aloneSentence(alone) {
  if (!alone || alone.seconds === null) return "";
  return alone.verdict === "alone" ? "It had the engine to itself." : `Alone it would have taken about ${ms(1000 * alone.seconds)}.`;
}


// Learn: five small runs on the user's own model, each with what to look for and what was found.
//
// The requests are real, and small. They have a cache salt of their own, so that what they find in the
// cache is what an earlier lesson left there; and they are not sent while others are being served.

import { ServerError, streamChat } from "./server.js";
import { byId, element, ms, number, plural, prefersStill, put, say, sheet } from "./dom.js";
import { drawClock, drawLane, label, scaleOf } from "./draw.js";
import { EXAMPLE } from "./example.js";
import { laneOfStream } from "./lane.js";

const LANE_HEIGHT = 24;
const ROW_HEIGHT = 40; // with a name above the lane LABEL_HEIGHT more
const LABEL_HEIGHT = 18;
const LEFT = 30;
const CLOCKS_MS = [250, 500, 1000, 2000, 4000, 6000, 8000, 12000, 20000, 30000, 60000, 120000];
const SHORT = "Name three things that are blue.";
// Long enough that its prefill is seen on a fast machine too.
const LONG = `${EXAMPLE.file.text}\n\nAnd once more:\n\n${EXAMPLE.file.text}\n\n${EXAMPLE.question}`;
const STORY = "Tell me about the sea in winter.";
const TOKENS = { short: 32, long: 32, writer: 96, reader: 8, drafted: 48 };
const LONG_TOKENS = 760; // about, for the time that is said beforehand
const SECOND_USER_AFTER = 6; // tokens of the first one's answer
// Where nothing was measured yet, both phases are taken to reach this share of the machine's limits.
const USUAL_EFFICIENCY = 0.3;

/** How often one value has another: "18", or "2.4". */
const times = (a, b) => (a / b >= 10 ? String(Math.round(a / b)) : (a / b).toFixed(1));

const LESSONS = [
  {
    title: "A short prompt",
    look: "Look for the blue: there is hardly any. Nearly all of the time goes to writing.",
    async run(lesson) {
      const { timings } = await lesson.ask(SHORT, { tokens: TOKENS.short, salt: "short" });
      lesson.shared.short = timings;
      return `${plural(timings.prompt_n + timings.cache_n, "token")}: the first one after ${ms(timings.ttft_ms)}, then ${ms(timings.tpot_ms)} per token.`;
    },
  },
  {
    title: "A long prompt",
    look: "Now the blue is most of it. The orange ticks keep their distance.",
    async run(lesson) {
      const { timings } = await lesson.ask(LONG, { tokens: TOKENS.long, salt: "long" });
      const { short } = lesson.shared;
      lesson.shared.long = timings;
      const prompt = timings.prompt_n + timings.cache_n;
      if (!short) return `${plural(prompt, "token")}: the first one after ${ms(timings.ttft_ms)}, then ${ms(timings.tpot_ms)} per token.`;
      return `${times(prompt, short.prompt_n + short.cache_n)} times the prompt, ${times(timings.ttft_ms, short.ttft_ms)} times the wait: ${ms(timings.ttft_ms)}. The pace: ${ms(timings.tpot_ms)} per token instead of ${ms(short.tpot_ms)}.`;
    },
  },
  {
    title: "The same again",
    look: "The hatched part came from the cache. What you wait for is what is new.",
    async run(lesson) {
      if (!lesson.shared.long) await lesson.ask(LONG, { tokens: 1, salt: "long", hidden: true });
      const { timings } = await lesson.ask(LONG, { tokens: TOKENS.long, salt: "long" });
      const { long } = lesson.shared;
      return `${number(timings.cache_n)} of ${number(timings.cache_n + timings.prompt_n)} tokens were cached: ${ms(timings.ttft_ms)}${long ? ` instead of ${ms(long.ttft_ms)}` : ""}.`;
    },
  },
  {
    title: "Two users at once",
    together: true,
    look: "One writes when the other one's prompt arrives. Computed whole, it tears a hole; in chunks, it does not.",
    async run(lesson) {
      const salt = `pair-${lesson.runs}`;
      let second = null;
      const first = lesson.ask(STORY, {
        label: "first user",
        tokens: TOKENS.writer,
        salt: "pair",
        onToken: (count) => {
          if (count >= SECOND_USER_AFTER) second ??= lesson.ask(LONG, { label: "second user", tokens: TOKENS.reader, salt });
        },
      });
      const { lane, timings } = await first;
      const other = await (second ?? lesson.ask(LONG, { label: "second user", tokens: TOKENS.reader, salt }));
      const gap = lane.stallsAt(Infinity).longest;
      const prefill = (lesson.shared.long ?? other.timings).prompt_ms;
      const estimated = heldUp(lane, other.lane, prefill);
      // How long chunks are belongs to the engine, which all requests share: no request can change it.
      const whole = other.lane.chunks.length < 2 ? " The prompt was computed whole. With a shorter --itl-slo-ms, such as 50, the server cuts it into chunks." : "";
      if (!estimated) return `The longest gap was ${ms(gap)}, and all stalls together ${ms(timings.ledger_ms.stall)}.${whole}`;
      lesson.rows.push({ text: "first user, if the second one's prompt were computed whole: an estimate", lane: () => estimated, faint: true });
      return `The longest gap was ${ms(gap)}; computed whole, the prompt would have made one of about ${ms(prefill)}. The price: the second user waited ${ms(other.timings.ttft_ms)} for the first token${lesson.shared.long ? ` instead of ${ms(lesson.shared.long.ttft_ms)}` : ""}. To see it computed whole, restart the server with --itl-slo-ms off.`;
    },
  },
  {
    title: "Drafts off and on",
    look: "The same answer twice: without drafts, then with its own text as the prediction. A dot is a token that came free with the step.",
    async run(lesson) {
      const plain = await lesson.ask(STORY, { label: "drafts off", tokens: TOKENS.drafted, salt: "guess", drafts: false });
      const guided = await lesson.ask(STORY, { label: "drafts on, and predicted", tokens: TOKENS.drafted, salt: "guess", prediction: plain.text });
      const same = plain.text === guided.text ? "The words are the same, bit for bit." : "The words differ, which they never should: please report it.";
      const { draft_n: drafted = 0, draft_n_accepted: accepted = 0 } = guided.timings;
      if (!drafted) return `This engine judged that guesses would not pay: ${ms(guided.timings.tpot_ms)} per token. ${same}`;
      return `${number(accepted)} of ${number(drafted)} guesses were accepted: ${ms(plain.timings.tpot_ms)} per token became ${ms(guided.timings.tpot_ms)}. ${same}`;
    },
  },
];

/**
 * The first user's lane if the second one's prompt had been computed in one piece: an estimate.
 *
 * Its tokens until then are facts; the prompt's time is one hole; later tokens come at their own pace,
 * without what the chunks added. Null where the prompt was computed in one piece anyway.
 */
function heldUp(lane, other, prefillMs) {
  const stalled = lane.ticks.filter((tick) => tick.stall > 0);
  if (other.chunks.length < 2 || stalled.length < 2) return null;
  const copy = Object.assign(Object.create(Object.getPrototypeOf(lane)), lane);
  let end = lane.first;
  let hole = prefillMs;
  copy.ticks = lane.ticks.map((tick) => {
    const begins = end;
    const isFirst = tick === stalled[0];
    end += tick.end - tick.start - tick.stall + (isFirst ? hole : 0);
    const stall = isFirst ? hole : 0;
    if (isFirst) hole = 0;
    return { ...tick, start: begins, end, stall };
  });
  copy.end = end;
  return copy;
}

export class Learn {
  constructor(engine) {
    this.engine = engine;
    this.shared = {}; // timings that later lessons compare with
    this.ids = new Set(); // of our own requests
    this.salt = Math.random().toString(36).slice(2);
    this.running = false;
    this.lessons = LESSONS.map((plan, i) => new Lesson(plan, i, this));
    byId("lessons").append(...this.lessons.map((lesson) => lesson.element));
    byId("all").onclick = () => this.runAll();
    this.showPlan();
  }

  /** What the runs are about to take, as well as it can be known. */
  showPlan() {
    const { hello } = this.engine;
    const seconds = this.expectedSeconds();
    const takes = seconds === null ? "How long they take is not known before the first one." : `They take about ${seconds < 10 ? Math.ceil(seconds) : 5 * Math.ceil(seconds / 5)} s.`;
    put(byId("learn-of"), `Five runs with ${hello?.model.replace(/^\w+:/, "") ?? "this server's model"}, of real and small requests. ${takes}`);
  }

  /** From the last request's rates; before one, from the machine's ceilings. */
  expectedSeconds() {
    const prompts = 3 * LONG_TOKENS;
    const tokens = Object.values(TOKENS).reduce((sum, count) => sum + count, TOKENS.long + TOKENS.drafted);
    const known = this.shared.long ?? this.shared.short ?? this.engine.recording?.lanes.findLast((lane) => lane.timings?.tpot_ms && lane.timings.prompt_per_token_ms)?.timings;
    if (known) return (prompts * known.prompt_per_token_ms + tokens * known.tpot_ms) / 1000;
    const { ceilings, shape } = this.engine.hello ?? {};
    const bandwidth = ceilings?.bandwidth?.at(-1)?.[1];
    if (!ceilings?.int8_ops || !bandwidth || !shape) return null;
    return ((prompts * shape.flops_per_token) / ceilings.int8_ops + (tokens * shape.weight_bytes) / bandwidth) / USUAL_EFFICIENCY;
  }

  /** Why no lesson can run now; empty if one can. */
  obstacle() {
    if (!this.engine.isReady) return "The model is not ready yet.";
    if (this.running) return "Another lesson is running.";
    const others = this.engine.recording?.lanes.filter((lane) => lane.end === Infinity && !this.ids.has(lane.id)) ?? [];
    if (others.length) return `${plural(others.length, "request")} of others ${others.length === 1 ? "is" : "are"} being served: a lesson would slow them down, and they would disturb it. Run it when the engine is idle.`;
    return "";
  }

  async runAll() {
    for (const lesson of this.lessons) if (!(await lesson.start())) return;
  }

  /** All lessons have one clock, so that their lengths can be compared. */
  get clock() {
    const longest = Math.max(...this.lessons.map((lesson) => lesson.length));
    return CLOCKS_MS.find((time) => time >= longest) ?? longest;
  }

  frame() {
    if (this.running && !prefersStill()) this.paint();
  }

  paint() {
    for (const lesson of this.lessons) lesson.paint();
  }
}

class Lesson {
  constructor(plan, index, learn) {
    this.plan = plan;
    this.learn = learn;
    this.rows = []; // {text, lane(), now(), faint}
    this.runs = 0;
    this.shared = learn.shared;
    this.canvas = element("canvas", { role: "img", "aria-label": `${plan.title}: not run yet` });
    this.found = element("p", { className: "found" });
    this.button = element("button", { type: "button", onclick: () => this.start() }, "Run");
    const heading = element("h2", {}, element("span", {}, String(index + 1)), plan.title);
    this.element = element("li", {}, element("div", {}, heading, element("p", { className: "look" }, plan.look), this.button), element("div", { className: "rows" }, this.canvas, this.found));
    this.grow();
    this.paint = sheet(this.canvas, (context, width, height) => this.draw(context, width, height));
  }

  get rowHeight() {
    return ROW_HEIGHT + (this.rows.some((row) => row.text) ? LABEL_HEIGHT : 0);
  }

  grow() {
    this.canvas.style.height = `${Math.max(1, this.rows.length) * this.rowHeight + 22}px`;
  }

  /** Run it. False if it could not. */
  async start() {
    const obstacle = this.learn.obstacle();
    if (obstacle) {
      put(this.found, obstacle);
      say(obstacle);
      return false;
    }
    const { learn } = this;
    learn.running = true;
    this.rows = [];
    this.runs += 1;
    this.began = performance.now();
    this.button.disabled = true;
    put(this.found, "Running.");
    try {
      const sentence = await this.plan.run(this);
      put(this.found, sentence);
      this.canvas.setAttribute("aria-label", `${this.plan.title}. ${sentence}`);
      say(sentence);
      return true;
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
      put(this.found, error.message);
      say(error.message);
      return false;
    } finally {
      learn.running = false;
      this.button.disabled = false;
      put(this.button, "Again");
      this.grow();
      learn.showPlan();
      learn.paint();
    }
  }

  /**
   * One request, drawn in a row of this lesson while it runs.
   *
   * @returns {Promise<{lane, timings, text}>} when it has ended
   */
  async ask(prompt, { tokens, salt, label: text = "", prediction, drafts = true, onToken = () => {}, hidden = false }) {
    const { engine, ids } = this.learn;
    const clock = () => performance.now() - this.began;
    const stream = laneOfStream(clock());
    const found = { text: "", timings: null, id: null };
    const lane = () => (found.id && engine.recording?.laneOf(found.id)) || stream.lane;
    const row = { text, lane, faint: false, now: () => (lane() === stream.lane ? clock() : engine.now()) };
    if (!hidden) this.rows.push(row);
    this.grow();
    let count = 0;
    const body = {
      messages: [{ role: "user", content: prompt }],
      max_tokens: tokens,
      temperature: 0,
      ignore_eos: true,
      cache_salt: `learn-${this.learn.salt}-${salt}`,
      ...(drafts ? {} : { num_speculative_tokens: 0 }),
      ...(prediction ? { prediction: { type: "content", content: prediction } } : {}),
    };
    await streamChat(body, (part) => {
      if (part.id) {
        found.id = part.id;
        ids.add(part.id);
        engine.recording?.nameRequest(part.id, `Learn: ${this.plan.title.toLowerCase()}`);
      }
      if (part.progress) stream.progress(part.progress);
      if (part.delta) {
        found.text += part.delta.content ?? "";
        count += part.tokens;
        stream.wrote(clock(), part.tokens);
        onToken(count);
      }
      if (part.finish) found.timings = part.timings;
    });
    stream.close(clock());
    await engine.settled(found.id);
    return { lane: lane(), timings: found.timings, text: found.text };
  }

  /** The moment of a row that is drawn as 0: that of the first row, where they ran together. */
  zeroOf(row) {
    return (this.plan.together ? this.rows[0] : row).lane().at;
  }

  /** How long its longest row is, ms. */
  get length() {
    return Math.max(0, ...this.rows.map((row) => (row.lane().end < Infinity ? row.lane().end - this.zeroOf(row) : 0)));
  }

  draw(context, width, height) {
    const clock = this.learn.clock;
    drawClock(context, scaleOf(0, clock, LEFT, width), 0, height, { ends: true });
    this.rows.forEach((row, i) => {
      const lane = row.lane();
      const zero = this.zeroOf(row);
      const y = (i + 1) * this.rowHeight - LANE_HEIGHT - 8;
      drawLane(context, lane, scaleOf(zero, zero + clock, LEFT, width), y, LANE_HEIGHT, row.now ? Math.min(row.now(), lane.end) : Infinity, { faint: row.faint });
      if (row.text) label(context, row.text, LEFT, y - 12, { size: 12 });
    });
  }
}

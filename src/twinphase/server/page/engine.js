// The engine: a lane for each request of the server on one clock, and the steps that they share.

import { getJson } from "./server.js";
import { byId, download, element, ms, palette, plural, prefersStill, put, say, sheet } from "./dom.js";
import { Panels, laneDetails, stepDetails } from "./panels.js";
import { drawClock, drawLane, drawSteps, label, scaleOf } from "./draw.js";
import { PHASE } from "./lane.js";
import { RecordingError, besides, openRecording, saveRecording } from "./recordings.js";
import { titleOf } from "./turn.js";

const SPAN_MS = 8000;
const SHORTEST_SPAN_MS = 50;
const WORDS_INTERVAL_MS = 120; // sentences change less often than pictures
const IDLE_MS = 3000; // after this long without a step the clock stops
const NARROW = 640;
const ROW_HEIGHTS = [[10, 37], [20, 27], [Infinity, 18]]; // up to so many rows, pixels

export class EngineView {
  /** @param engine what the page knows of the engine: `{recording, now()}` */
  constructor(engine) {
    this.engine = engine;
    this.opened = null; // a file's recording; null shows the engine itself
    this.playing = !prefersStill();
    this.t = 0;
    this.span = SPAN_MS;
    this.from = 0;
    this.follow = true; // the picture moves with the clock
    this.lane = null;
    this.step = null;
    this.rows = [];
    this.saidAt = 0;
    this.buttons = new Map();
    this.paint = sheet(byId("time"), (context, width) => this.drawTime(context, width));
    this.panels = new Panels();
    this.listen();
  }

  get recording() {
    return this.opened ?? this.engine.recording;
  }

  get isLive() {
    return this.opened === null;
  }

  /* Controls */

  listen() {
    const click = (id, action) => (byId(id).onclick = action);
    click("pause", () => this.togglePlay());
    click("live", () => this.show(null));
    click("in", () => this.zoom(0.6));
    click("out", () => this.zoom(1.6));
    click("fit", () => this.fit());
    click("save", () => this.save());
    click("open", () => byId("open-file").click());
    click("compare", () => byId("compare-file").click());
    byId("open-file").onchange = (event) => this.openFile(event.target, (found) => found);
    byId("compare-file").onchange = (event) => this.openFile(event.target, (found) => besides(this.recording, found));
    byId("seek").oninput = () => {
      this.t = Number(byId("seek").value);
      this.playing = false;
      this.follow = true;
      this.render(true);
    };
    const line = byId("line");
    line.onkeydown = (event) => {
      const action = event.target === line && !event.ctrlKey && !event.metaKey && !event.altKey ? this.keys()[event.key] : undefined;
      if (!action) return;
      event.preventDefault();
      action();
    };
    byId("detail").onkeydown = (event) => {
      if (event.key === "Escape") this.leaveDetails();
    };
    this.listenToPointer(byId("time"));
    new ResizeObserver(() => this.render(true)).observe(line);
  }

  keys() {
    return {
      " ": () => this.togglePlay(),
      ArrowDown: () => this.pickNeighbour(1),
      ArrowUp: () => this.pickNeighbour(-1),
      ArrowRight: () => this.pickStep(1),
      ArrowLeft: () => this.pickStep(-1),
      Enter: () => (this.lane || this.step ? byId("detail").focus() : this.pickStep(0)),
      Escape: () => this.pick({}),
      "+": () => this.zoom(0.6),
      "-": () => this.zoom(1.6),
      Home: () => this.jump(this.recording.begin),
      End: () => this.jump(this.recording.end),
    };
  }

  /** Dragging moves the time line; a click chooses a request or a step; the wheel zooms with Ctrl. */
  listenToPointer(canvas) {
    let drag = null;
    canvas.onpointerdown = (event) => {
      drag = { x: event.clientX, from: this.from, moved: false };
      canvas.setPointerCapture(event.pointerId);
    };
    canvas.onpointermove = (event) => {
      if (!drag) return;
      const distance = event.clientX - drag.x;
      if (Math.abs(distance) <= 4 && !drag.moved) return;
      drag.moved = true;
      this.follow = false;
      this.from = drag.from - (distance / (canvas.clientWidth - this.place.left)) * this.span;
      this.render();
    };
    canvas.onpointerup = (event) => {
      if (drag && !drag.moved) this.pickAt(event.offsetX, event.offsetY);
      drag = null;
    };
    canvas.onpointercancel = () => (drag = null);
    canvas.onwheel = (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.15 : 0.87);
    };
  }

  togglePlay() {
    this.playing = !this.playing;
    if (this.playing) {
      this.follow = true;
      if (!this.isLive && this.t >= this.recording.end) this.t = this.recording.begin;
    }
    this.render(true);
  }

  zoom(factor) {
    const whole = Math.max(SHORTEST_SPAN_MS, (this.recording.end - this.recording.begin) * 1.05);
    const longest = this.isLive ? Math.max(whole, SPAN_MS) : whole;
    this.span = Math.min(longest, Math.max(SHORTEST_SPAN_MS, this.span * factor));
    if (!this.follow) this.from = Math.max(this.recording.begin, this.t - this.span / 2);
    this.render(true);
  }

  fit() {
    const { begin, end } = this.recording;
    this.span = Math.max(SHORTEST_SPAN_MS, (end - begin) * 1.03);
    this.from = begin;
    this.follow = false;
    this.render(true);
  }

  jump(t) {
    this.t = t;
    this.playing = false;
    this.follow = true;
    this.render(true);
  }

  /* Recordings */

  /** Show a recording, or the engine itself (null). */
  show(recording) {
    this.opened = recording;
    this.lane = null;
    this.step = null;
    this.follow = true;
    this.rows = [];
    byId("lanes").replaceChildren();
    this.buttons.clear();
    byId("live").hidden = this.isLive;
    const length = this.recording.end - this.recording.begin;
    this.span = this.isLive ? SPAN_MS : Math.max(SHORTEST_SPAN_MS, length * 1.03);
    this.t = this.isLive ? this.engine.now() : prefersStill() ? this.recording.end : this.recording.begin;
    this.playing = !prefersStill();
    this.showDetails();
    this.render(true);
  }

  async save() {
    const { recording } = this;
    if (!recording?.hello) return;
    const stamp = new Date().toISOString().slice(0, 19).replaceAll(":", "-");
    download(`twinphase-${stamp}.jsonl.gz`, await saveRecording(recording));
    say("The recording is saved. It has no text of any request.");
  }

  async openFile(input, use) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      this.show(use(await openRecording(file)));
      this.problem = "";
      say(`${file.name} is opened: ${plural(this.recording.lanes.length, "request")}.`);
    } catch (error) {
      if (!(error instanceof RecordingError)) throw error;
      this.problem = error.message;
      say(error.message);
    }
    this.render(true);
  }

  /* Choosing a request or a step */

  pick({ lane = null, step = null }) {
    this.lane = lane;
    this.step = step;
    if (lane || step) this.playing = false;
    if (step && (this.t < step.end || step.end < this.from || step.start > this.from + this.span)) {
      this.t = Math.max(this.t, step.end);
      this.from = Math.max(this.recording.begin, step.start - this.span * 0.6);
      this.follow = false;
    }
    if (lane && lane.at > this.t) this.t = Math.min(lane.end, this.recording.end);
    this.showDetails();
    this.render(true);
  }

  pickNeighbour(by) {
    const lanes = this.rows.length ? this.recording.lanes.filter((lane) => lane.at <= this.t) : [];
    if (!lanes.length) return;
    const at = lanes.indexOf(this.lane);
    const next = at < 0 ? (by > 0 ? 0 : lanes.length - 1) : (at + by + lanes.length) % lanes.length;
    this.pick({ lane: lanes[next] });
  }

  pickStep(by) {
    const { steps } = this.recording;
    if (!steps.length) return;
    const at = this.step ? steps.indexOf(this.step) : steps.findLastIndex((step) => step.start <= this.t);
    this.pick({ step: steps[Math.min(steps.length - 1, Math.max(0, at + by))] });
  }

  pickAt(x, y) {
    const { place } = this;
    if (y < place.steps) {
      const row = this.rows[Math.floor((y - place.top) / place.row)];
      const t = this.scale().back(x);
      const near = row?.lanes.find((lane) => lane.at <= t && t <= Math.min(lane.end, this.t));
      this.pick({ lane: near ?? row?.lanes.at(-1) ?? null });
      return;
    }
    const t = this.scale().back(x);
    const strip = Math.min(place.strips - 1, Math.floor((y - place.steps) / place.each));
    this.pick({ step: this.recording.steps.find((step) => step.worker === strip && step.start <= t && t <= step.end && step.start <= this.t) ?? null });
  }

  leaveDetails() {
    this.pick({});
    byId("line").focus();
  }

  async showDetails() {
    const box = byId("detail");
    const { lane, step, recording } = this;
    box.hidden = !lane && !step;
    if (box.hidden) return;
    const close = () => this.leaveDetails();
    if (step) {
      const { nodes, sentence } = stepDetails(step, recording, close);
      box.replaceChildren(...nodes);
      say(sentence);
      return;
    }
    const fill = () => {
      const { nodes, sentence } = laneDetails(lane, recording, close);
      box.replaceChildren(...nodes);
      return sentence;
    };
    say(fill());
    if (!this.isLive || !lane.own || !lane.id || lane.explanation || lane.end === Infinity) return;
    try {
      lane.explanation = await getJson(`v1/requests/${encodeURIComponent(lane.id)}/explain`);
      if (this.lane === lane) fill();
    } catch {
      // The server keeps the last requests only; the lane itself is complete.
    }
  }

  /* Drawing */

  /** The view is shown: its picture is of now, also where it does not move by itself. */
  enter() {
    if (this.isLive && this.recording) this.t = this.liveMoment();
    this.render(true);
  }

  /** Called for every frame of the screen while this view is seen. */
  frame(passed) {
    if (!this.recording || !this.playing) return;
    if (this.isLive) this.t = this.liveMoment();
    else {
      this.t += passed * Number(byId("speed").value);
      if (this.t > this.recording.end + 1200) this.t = this.recording.begin;
    }
    this.render();
  }

  /** Now, or where the clock stopped because the engine has nothing to do. */
  liveMoment() {
    const now = this.engine.now();
    const { recording } = this;
    const busy = recording.lanes.some((lane) => lane.end === Infinity);
    return busy ? now : Math.min(now, recording.end + IDLE_MS);
  }

  scale() {
    const width = byId("time").clientWidth;
    return scaleOf(this.from, this.from + this.span, this.place.left, width);
  }

  render(force = false) {
    const { recording } = this;
    if (!recording || byId("engine").hidden) return;
    if (this.follow) this.from = Math.max(this.isLive ? -Infinity : recording.begin - 0.02 * this.span, this.t - this.span * 0.94);
    this.layOut();
    this.paint();
    const now = performance.now();
    if (!force && now - this.saidAt < WORDS_INTERVAL_MS) return;
    this.saidAt = now;
    this.panels.show(recording, this.t, this.isLive);
    this.showWords();
  }

  /** Which rows there are, and where everything stands. */
  layOut() {
    const { recording } = this;
    const width = byId("line").clientWidth;
    const wide = width > NARROW;
    const byRow = new Map();
    for (const lane of recording.lanes) {
      if (lane.at > this.t || lane.at > this.from + this.span || Math.min(lane.end, this.t) < this.from) continue;
      if (!byRow.has(lane.row)) byRow.set(lane.row, []);
      byRow.get(lane.row).push(lane);
    }
    this.rows = [...byRow].sort((a, b) => a[0] - b[0]).map(([row, lanes]) => ({ row, lanes }));
    const [, dense] = ROW_HEIGHTS.find(([most]) => this.rows.length <= most);
    const row = wide ? dense : dense + 15;
    const strips = Math.max(1, recording.workers.length);
    const strip = strips > 1 ? 70 : 96;
    const down = strips > 1 ? 22 : 38;
    const top = 22;
    const lanes = Math.max(this.isLive ? 5 : 1, this.rows.length) * row;
    const steps = top + lanes + 16;
    const each = strip + down + 26;
    this.place = { left: wide ? 204 : 0, row, lane: Math.min(24, dense - 3), top, lanes, strip, down, strips, steps, each };
    const height = `${steps + each * strips}px`;
    const canvas = byId("time");
    if (canvas.style.height !== height) canvas.style.height = height;
    byId("lanes").classList.toggle("dense", dense < 37);
  }

  rowTop(index) {
    const { top, row, lane } = this.place;
    return top + index * row + row - lane - (row > 30 ? 5 : 1);
  }

  drawTime(context, width) {
    const { recording, place } = this;
    if (!recording || !place) return;
    const scale = this.scale();
    const bottom = place.steps + place.each * place.strips;
    context.save();
    context.beginPath();
    context.rect(place.left, 0, width - place.left, bottom);
    context.clip();
    drawClock(context, scale, 0, bottom, { zero: recording.zero });
    this.rows.forEach(({ lanes }, i) => {
      if (lanes.includes(this.lane)) {
        context.fillStyle = palette.page;
        context.fillRect(place.left, place.top + i * place.row, width, place.row - 2);
      }
      for (const lane of lanes) drawLane(context, lane, scale, this.rowTop(i), place.lane, this.t);
    });
    if (this.lane) this.drawTies(context, scale);
    this.drawMarks(context, scale, bottom);
    const targets = this.drawStrips(context, scale, width);
    if (scale(this.t) < width) line(context, palette.text, scale(this.t), 16, bottom - 24, 0.35);
    context.restore();
    if (place.left) this.drawStripLabels(context, targets);
  }

  /** Hairlines from a chosen request to those whose chunks, or whose answers, were in its steps. */
  drawTies(context, scale) {
    const rowOf = (lane) => this.rows.findIndex(({ lanes }) => lanes.includes(lane));
    const middle = (row) => this.rowTop(row) + this.place.lane / 2;
    const own = rowOf(this.lane);
    if (own < 0) return;
    for (const step of this.recording.stepsBetween(scale.from, Math.min(this.t, scale.to))) {
      if (!step.prefill.length || !step.decode.length) continue;
      const has = (list) => list.some((one) => one.lane === this.lane);
      const others = has(step.decode) ? step.prefill : has(step.prefill) ? step.decode : [];
      for (const { lane } of others) {
        const row = rowOf(lane);
        if (row >= 0 && row !== own) line(context, palette.prefill, scale((step.start + step.end) / 2), Math.min(middle(own), middle(row)), Math.max(middle(own), middle(row)), 0.3);
      }
    }
  }

  drawMarks(context, scale, bottom) {
    for (const { at, text } of this.recording.marks) {
      if (at > this.t || scale(at) < scale.left - 1) continue;
      line(context, palette.text, scale(at), 16, bottom - 24, 0.8);
      label(context, text, scale(at) + 5, this.place.top + this.place.lanes + 10, { colour: palette.text, size: 11 });
    }
    if (this.step) {
      context.globalAlpha = 0.1;
      context.fillStyle = palette.text;
      context.fillRect(scale(this.step.start), this.place.top, Math.max(1, scale(this.step.end) - scale(this.step.start)), this.place.lanes + 10);
      context.globalAlpha = 1;
    }
  }

  drawStrips(context, scale, width) {
    const { recording, place } = this;
    const seen = recording.stepsBetween(scale.from, scale.to);
    const targets = [];
    for (let strip = 0; strip < place.strips; strip += 1) {
      const y = place.steps + strip * place.each + place.strip;
      const steps = place.strips > 1 ? seen.filter((step) => step.worker === strip) : seen;
      const view = { target: recording.target, now: this.t, picked: this.step };
      targets[strip] = drawSteps(context, steps, scale, { y, up: place.strip - 10, down: place.down }, view);
      line(context, palette.grid, place.left, y + 1, y + 2, 1, width);
      if (!place.left) {
        const words = place.strips > 1 ? recording.workers[strip] : `Steps: time above${targets[strip] ? `, dashed the target of ${ms(recording.target)}` : ""}; tokens below`;
        label(context, words, 4, y - place.strip + 6);
      }
    }
    return targets;
  }

  drawStripLabels(context, targets) {
    const { recording, place } = this;
    for (let strip = 0; strip < place.strips; strip += 1) {
      const y = place.steps + strip * place.each + place.strip;
      label(context, recording.workers.length > 1 ? recording.workers[strip] : "Steps", 0, y - place.strip + 16, { colour: palette.text, size: 14 });
      if (targets[strip] !== null) label(context, `target ${ms(recording.target)}`, place.left - 8, targets[strip] + 4, { align: "right" });
      if (strip > 0) continue;
      label(context, "time, and what was predicted", 0, y - 8);
      label(context, "rows and prompt tokens", 0, y + 16);
    }
  }

  /* Words */

  showWords() {
    const { recording } = this;
    put(byId("pause"), this.playing ? "Pause" : "Play");
    byId("speed").hidden = this.isLive;
    this.nameRows();
    const seek = byId("seek");
    seek.min = recording.begin;
    seek.max = recording.end;
    seek.value = Math.min(this.t, recording.end);
    seek.setAttribute("aria-valuetext", `${((this.t - recording.zero) / 1000).toFixed(1)} of ${((recording.end - recording.zero) / 1000).toFixed(1)} seconds`);
    if (this.problem) {
      byId("state").replaceChildren(this.problem);
      return;
    }
    byId("state").replaceChildren(...this.stateSentence());
  }

  stateSentence() {
    const { recording, t } = this;
    const at = recording.countsAt(t);
    const last = recording.stepAt(t);
    const idle = at.decode + at.prefill + at.queued === 0;
    if (idle) {
      const since = this.isLive ? this.engine.now() - (last?.end ?? recording.begin) : 0;
      const words = last ? (since > IDLE_MS ? `No step for ${seconds(since)}.` : "All answered.") : "No step yet. Ask something, and watch it here.";
      return ["The engine is idle.", element("small", {}, words)];
    }
    const decode = element("b", { className: "d" }, String(at.decode));
    const prefill = element("b", { className: "p" }, String(at.prefill));
    const sentence = [
      decode, element("span", { className: "d" }, at.decode === 1 ? " answer being written" : " answers being written"), ", ",
      prefill, element("span", { className: "p" }, at.prefill === 1 ? " prompt being computed" : " prompts being computed"), ", ",
      element("b", {}, String(at.queued)), " waiting.",
    ];
    const step = last ? `This step: ${ms(last.ms)}, ${plural(last.decode.length, "answer")}, ${plural(last.tokens, "prompt token")}.` : "";
    return [...sentence, element("small", {}, step)];
  }

  /** A button for each row, which names the request that is there now. */
  nameRows() {
    const { place } = this;
    const list = byId("lanes");
    const wanted = new Set(this.rows.map(({ row }) => row));
    for (const [row, button] of this.buttons) {
      if (wanted.has(row)) continue;
      button.remove();
      this.buttons.delete(row);
    }
    this.rows.forEach(({ row, lanes }, i) => {
      const lane = lanes.findLast((one) => one.at <= this.t) ?? lanes[0];
      let button = this.buttons.get(row);
      if (!button) {
        button = element("button", { type: "button", tabIndex: -1 }, element("span"), " ", element("small"));
        this.buttons.set(row, button);
        list.append(button);
      }
      button.onclick = () => {
        this.pick({ lane });
        byId("line").focus();
      };
      button.className = lane.name || lane.own ? "" : "other";
      button.setAttribute("aria-pressed", String(this.lane !== null && lanes.includes(this.lane)));
      button.style.top = `${place.top + i * place.row + (place.left && place.row > 30 ? 3 : 0)}px`;
      put(button.firstChild, titleOf(lane));
      put(button.lastChild, stateOf(lane, this.t));
    });
  }
}

function stateOf(lane, t) {
  const phase = lane.phaseAt(t);
  if (phase === PHASE.queued) return `waits, ${ms(t - lane.waits.findLast(([start]) => start <= t)[0])}`;
  if (phase === PHASE.prefill) return `${lane.readAt(t)} of ${lane.prompt} computed`;
  const pace = lane.paceAt(t);
  const tokens = plural(lane.writtenAt(t), "token");
  if (phase === PHASE.decode) return pace === null ? tokens : `${tokens}, ${ms(pace)} per token`;
  return lane.first < Infinity ? `done: ${tokens}, first after ${ms(lane.first - lane.at)}` : lane.finish || "ended";
}

const seconds = (time) => (time < 10000 ? `${(time / 1000).toFixed(1)} s` : `${Math.round(time / 1000)} s`);

/** An upright hairline, or with `width` a level one. */
function line(context, colour, x, top, bottom, alpha, width = 1) {
  context.globalAlpha = alpha;
  context.fillStyle = colour;
  context.fillRect(x, top, width, bottom - top);
  context.globalAlpha = 1;
}


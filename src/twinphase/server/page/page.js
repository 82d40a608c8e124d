// The page: its three views, the feed that they share, and the states that stand above them all.

import { Feed, onKeyWanted, useKey } from "./server.js";
import { byId, palette, put, readPalette, say, sheet } from "./dom.js";
import { Chat } from "./chat.js";
import { drawPulse } from "./draw.js";
import { EngineView } from "./engine.js";
import { Learn } from "./learn.js";
import { Recording } from "./recording.js";

const VIEWS = ["chat", "engine", "learn"];
const PULSE_MS = 8000;
const SETTLE_MS = 10_000; // a server without time to spare may need so long for the last event of a request

/**
 * What the page knows of the server's engine: the recording that the feed writes, and its clock.
 *
 * The clock of the engine is not the browser's: the newest moment that was heard says how they differ.
 */
class Engine {
  constructor() {
    this.recording = null;
    this.offset = null; // ms from performance.now() to the recording's clock
    this.ready = Promise.withResolvers?.() ?? deferred();
    this.isReady = false;
    this.isHeard = false; // the feed is open
  }

  get hello() {
    return this.recording?.hello ?? null;
  }

  now() {
    if (this.offset === null) return this.recording?.end ?? 0;
    return performance.now() + this.offset;
  }

  hear(event) {
    this.recording ??= new Recording({ live: true });
    this.recording.add(event);
    const seen = event.t + this.recording.shift - performance.now();
    // The event that was fastest on its way says best how the clocks differ; old ones count less.
    this.offset = this.offset === null || event.event === "hello" ? seen : Math.max(seen, this.offset - 0.02);
  }

  setReady(isReady) {
    if (isReady && !this.isReady) this.ready.resolve();
    if (!isReady && this.isReady) this.ready = deferred();
    this.isReady = isReady;
  }

  /** Until the model is loaded, or the signal aborts. */
  whenReady(signal) {
    const aborted = new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
    return Promise.race([this.ready.promise, aborted]);
  }

  /** A request's lane once the feed has sent all of it. A feed that is closed is not waited for. */
  async settled(id) {
    const find = () => (id ? this.recording?.laneOf(id) : null);
    const deadline = performance.now() + SETTLE_MS;
    while (id && this.isHeard && !find()?.timings && performance.now() < deadline) {
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    return find();
  }
}

function deferred() {
  const found = {};
  found.promise = new Promise((resolve, reject) => Object.assign(found, { resolve, reject }));
  return found;
}

const engine = new Engine();
const chat = new Chat(engine);
const engineView = new EngineView(engine);
const learn = new Learn(engine);
let view = "chat";

/* The feed, and what the line under the header says of it */

function onEvent(event) {
  engine.hear(event);
  if (event.event !== "hello") return;
  engine.setReady(true);
  notice("");
  const { model, quantization, threads } = event;
  put(byId("served"), [model.replace(/^\w+:/, ""), quantization, threads ? `${threads} ${threads === 1 ? "thread" : "threads"}` : ""].filter(Boolean).join(" · "));
  chat.showContext();
  chat.showLastRequest();
  learn.showPlan();
}

function onState(state) {
  engine.isHeard = state.kind === "connected";
  if (state.kind === "connected") {
    engine.setReady(true);
    notice("");
    return;
  }
  if (state.kind === "loading") {
    engine.setReady(false);
    put(byId("served"), state.stage);
    notice(`The model is not ready: ${state.stage}. A question is sent as soon as it is.`);
    return;
  }
  if (state.kind === "lost") {
    // Questions may still be asked: an answer that fails says why.
    engine.setReady(true);
    countDown(state);
    return;
  }
  if (state.kind === "refused") {
    engine.setReady(true);
    notice(state.status === 401 ? "" : `${state.message} What happens in the engine cannot be shown.`);
  }
}

let countdown = 0;

function notice(text, bad = false) {
  clearInterval(countdown);
  const line = byId("notice");
  line.hidden = text === "";
  line.classList.toggle("bad", bad);
  put(line, text);
}

function countDown({ seconds, message }) {
  const until = performance.now() + 1000 * seconds;
  const why = message || "The server does not answer.";
  const show = () => {
    const left = Math.max(1, Math.ceil((until - performance.now()) / 1000));
    put(byId("notice"), `${why} What you see is the last it sent; trying again in ${left} s.`);
  };
  notice(why, true);
  show();
  countdown = setInterval(show, 500);
}

const feed = new Feed(onEvent, onState);

/* The key */

onKeyWanted(() => {
  if (!byId("key").hidden) return;
  byId("key").hidden = false;
  byId("key-value").focus();
  say("This server asks for a key.");
});
byId("key").onsubmit = (event) => {
  event.preventDefault();
  useKey(byId("key-value").value.trim());
  byId("key-value").value = "";
  byId("key").hidden = true;
  feed.restart();
  byId("prompt").focus();
};

/* Views, theme, frames */

function go() {
  const wanted = location.hash.slice(1);
  if (VIEWS.includes(wanted)) view = wanted;
  for (const name of VIEWS) {
    byId(name).hidden = name !== view;
    const link = document.querySelector(`nav [href="#${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view[0].toUpperCase()}${view.slice(1)} · twinphase`;
  if (view === "engine") engineView.enter();
}

byId("theme").onclick = () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  readPalette();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readPalette);

const pulse = sheet(byId("pulse"), (context, width, height) => {
  const { recording } = engine;
  const now = recording ? Math.min(engine.now(), recording.end + 500) : 0;
  drawPulse(context, width, height, recording ? recording.stepsBetween(now - PULSE_MS, now) : [], now, PULSE_MS);
});

let before = performance.now();

function frame(now) {
  const passed = Math.min(100, now - before);
  before = now;
  if (engine.recording) pulse();
  if (view === "chat") chat.frame();
  if (view === "engine") engineView.frame(passed);
  if (view === "learn") learn.frame();
  requestAnimationFrame(frame);
}

addEventListener("hashchange", go);
readPalette();
go();
feed.connect();
requestAnimationFrame(frame);

// For tests, which compare what is drawn with what the server says.
globalThis.twinphase = { engine, chat, engineView, learn, feed, palette };

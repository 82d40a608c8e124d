// The chat: conversations with the server's model, kept in this browser.

import { Answer } from "./answer.js";
import { ServerError, ask, getJson, streamChat } from "./server.js";
import { byId, element, number, plural, prefersStill, put, say, sheet } from "./dom.js";
import { drawLane, label, scaleOf } from "./draw.js";
import { EXAMPLE } from "./example.js";
import { excerptOf, laneFromTimeline, laneOfStream, thawed } from "./lane.js";
import { SettingError, conversations, forget, forgetAll, keep, requestFields, settingsForm } from "./conversation.js";
import { TurnView } from "./turn.js";

const MAX_FILE_BYTES = 2 << 20;
const MAX_PART_NAME = 64;
const CHARACTERS_PER_TOKEN = 4; // for the estimate of what is typed but not counted yet
const TITLE_CHARACTERS = 60;

export class Chat {
  /** @param engine what the page knows of the engine: `{recording, now(), whenReady(), hello}` */
  constructor(engine) {
    this.engine = engine;
    this.views = []; // of the turns on the page, in order
    this.running = null; // {view, controller}
    this.files = []; // {name, text}, for the next question
    this.conversation = emptyConversation();
    this.used = 0; // tokens of the context
    this.lastRequest = null; // the lane above the composer of an empty chat
    this.listen();
    this.paintSeam = sheet(byId("seam"), (context, width, height) => this.drawSeam(context, width, height));
  }

  listen() {
    const prompt = byId("prompt");
    byId("composer").onsubmit = (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.send();
    };
    prompt.onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.send();
      }
      if (event.key === "Escape") this.stop();
    };
    prompt.oninput = () => this.showContext();
    byId("attach").onclick = () => byId("attach-file").click();
    byId("attach-file").onchange = async (event) => {
      for (const file of event.target.files) await this.attach(file);
      event.target.value = "";
      prompt.focus();
    };
    byId("settings").onclick = () => this.togglePanel("settings");
    byId("history").onclick = () => this.togglePanel("history");
    byId("fresh").onclick = () => this.open(emptyConversation());
    byId("example").onclick = () => {
      this.files = [EXAMPLE.file];
      prompt.value = EXAMPLE.question;
      this.send();
    };
    byId("panel").onkeydown = (event) => {
      if (event.key === "Escape") this.togglePanel(null);
    };
    // Text that is dropped anywhere on the chat is attached.
    byId("chat").ondragover = (event) => event.preventDefault();
    byId("chat").ondrop = async (event) => {
      event.preventDefault();
      for (const file of event.dataTransfer.files) await this.attach(file);
    };
  }

  /* What is asked */

  async attach(file) {
    if (file.size > MAX_FILE_BYTES) return this.complain(`${file.name} is larger than 2 MiB. Attach a part of it.`);
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch {
      return this.complain(`${file.name} is not text in UTF-8. Attach a text file.`);
    }
    this.files.push({ name: file.name.slice(0, MAX_PART_NAME) || "text", text });
    this.showAttached();
    return undefined;
  }

  complain(sentence) {
    put(byId("context-says"), sentence);
    say(sentence);
  }

  showAttached() {
    const list = byId("attached");
    list.hidden = this.files.length === 0;
    list.replaceChildren(
      ...this.files.map((file) => {
        const remove = () => {
          this.files = this.files.filter((one) => one !== file);
          this.showAttached();
          byId("prompt").focus();
        };
        return element("li", {}, file.name, " ", element("button", { type: "button", "aria-label": `Remove ${file.name}`, onclick: remove }, "✕"));
      }),
    );
    this.showContext();
  }

  /** The line above the composer: tokens in use, and lighter what is about to be added. */
  showContext() {
    const context = this.engine.hello?.context;
    const typed = byId("prompt").value.length + this.files.reduce((sum, file) => sum + file.text.length, 0);
    const guess = Math.ceil(typed / CHARACTERS_PER_TOKEN);
    const share = (tokens) => (context ? Math.min(100, (100 * tokens) / context) : 0);
    const meter = byId("composer").querySelector(".context");
    meter.children[0].style.width = `${share(this.used)}%`;
    meter.children[1].style.width = `${Math.min(share(guess), 100 - share(this.used))}%`;
    meter.setAttribute("aria-valuenow", Math.round(share(this.used)));
    const known = context ? `${number(this.used)} of ${number(context)} tokens of context used` : "The size of the context is not known yet";
    meter.setAttribute("aria-valuetext", known);
    const tight = context && this.used + guess > 0.8 * context;
    put(byId("context-says"), tight ? `${known}${guess ? `, about ${number(guess)} more with this` : ""}` : "");
  }

  send() {
    const question = byId("prompt").value.trim();
    if (question === "" && this.files.length === 0) return;
    const turn = { question, files: this.files, answer: new Answer() };
    byId("prompt").value = "";
    this.files = [];
    this.showAttached();
    this.begin(turn);
  }

  /** Ask again what a turn asked, and forget what came after it. */
  retry(turn, question = turn.question) {
    this.stop();
    this.cutFrom(turn);
    this.begin({ question, files: turn.files, result: turn.result, answer: new Answer() });
  }

  cutFrom(turn) {
    const at = this.conversation.turns.indexOf(turn);
    for (const view of this.views.splice(at)) view.remove();
    this.conversation.turns.splice(at);
  }

  /** The messages of the conversation up to the turn that is asked now. */
  messages() {
    const system = this.conversation.settings.system?.trim();
    const found = system ? [{ role: "system", content: system }] : [];
    for (const { question, files, answer, result } of this.conversation.turns) {
      if (result) found.push({ role: "tool", tool_call_id: result.id, content: result.text });
      else found.push({ role: "user", content: files.length ? parts(files, question) : question });
      const text = answer.text();
      const calls = answer.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      if (text || calls.length) found.push({ role: "assistant", content: text || null, ...(calls.length ? { tool_calls: calls } : {}) });
    }
    return found;
  }

  async begin(turn) {
    const { conversation } = this;
    conversation.turns.push(turn);
    conversation.title ||= (turn.question || turn.files[0]?.name || "").slice(0, TITLE_CHARACTERS);
    const source = this.liveSource(turn);
    const view = this.addView(turn, source);
    const controller = new AbortController();
    this.running = { view, turn, controller };
    put(byId("send"), "Stop");
    say("Asked.");
    view.element.scrollIntoView({ block: "start", behavior: prefersStill() ? "auto" : "smooth" });
    try {
      const body = { ...requestFields(conversation.settings), messages: this.messages() };
      await this.engine.whenReady(controller.signal);
      source.sent = performance.now();
      await streamChat(body, (part) => this.heard(turn, source, part), controller.signal);
    } catch (error) {
      this.failed(turn, error);
    }
    await this.complete(turn, view, source);
  }

  heard(turn, source, part) {
    if (part.id) {
      turn.id = part.id;
      this.engine.recording?.nameRequest(part.id, turn.question || turn.files[0]?.name || "a tool's result");
    }
    if (part.progress) source.stream.progress(part.progress);
    if (part.delta) {
      turn.answer.add(part.delta, part.tokens);
      source.stream.wrote(performance.now() - source.sent, part.tokens);
    }
    if (part.finish) {
      turn.finish = part.finish;
      turn.timings = part.timings;
    }
    if (part.usage) this.used = part.usage.total_tokens;
  }

  failed(turn, error) {
    if (error.name === "AbortError") turn.finish = "stopped";
    else if (error instanceof ServerError || error instanceof SettingError) turn.error = { message: error.message, retryAfter: error.retryAfter ?? null };
    else {
      turn.error = { message: `This page failed: ${error.message}. Ask again.` };
      console.error(error);
    }
  }

  /** The answer has ended: get what the server knows of it, show it, keep it. */
  async complete(turn, view, source) {
    if (this.running?.turn === turn) {
      this.running = null;
      put(byId("send"), "Send");
    }
    source.stream.close(performance.now() - (source.sent ?? performance.now()));
    const lane = await this.engine.settled(turn.id);
    // Of an answer that was stopped, the feed has the ledger up to there.
    turn.timings ??= lane?.timings;
    if (turn.id) await this.learnWhy(turn);
    turn.excerpt = source.lane ? excerptOf(source) : null;
    view.finish();
    this.showContext();
    await this.save();
  }

  async learnWhy(turn) {
    try {
      turn.explanation = await getJson(`v1/requests/${encodeURIComponent(turn.id)}/explain`);
    } catch {
      turn.explanation = null; // an older request than the server keeps, or a server that has gone
    }
  }

  stop() {
    this.running?.controller.abort();
  }

  /** A tool's result was typed: it is sent, and the model goes on. */
  answerCall(call, text) {
    call.result = text;
    this.begin({ question: `${call.name} answered: ${text}`, files: [], result: { id: call.id, text }, answer: new Answer() });
  }

  /* What is shown */

  /** What a running turn is drawn from: the feed's lane of its request, or the answer's own stream. */
  liveSource(turn) {
    const { engine } = this;
    const stream = laneOfStream();
    const fromFeed = () => (turn.id ? engine.recording?.laneOf(turn.id) : null);
    return {
      stream,
      sent: null,
      get lane() {
        return fromFeed() ?? (stream.lane.prompt ? stream.lane : null);
      },
      get steps() {
        return fromFeed() ? engine.recording.steps : stream.steps;
      },
      get target() {
        return engine.recording?.target ?? 0;
      },
      now() {
        return fromFeed() ? engine.now() : performance.now() - (this.sent ?? performance.now());
      },
    };
  }

  addView(turn, source) {
    byId("welcome").hidden = true;
    const view = new TurnView(turn, source, {
      edit: (question) => this.retry(turn, question),
      retry: () => this.retry(turn),
      answerCall: (call, text) => this.answerCall(call, text),
    });
    this.views.push(view);
    byId("thread").append(view.element);
    return view;
  }

  /** Called for every frame of the screen while the chat is seen. */
  frame() {
    for (const view of this.views) if (view.isMoving) view.update();
  }

  async open(conversation) {
    this.stop();
    for (const view of this.views.splice(0)) view.remove();
    this.conversation = conversation;
    this.used = 0;
    byId("welcome").hidden = conversation.turns.length > 0;
    for (const turn of conversation.turns) {
      turn.answer = new Answer(turn.answer);
      const view = this.addView(turn, { ...thawed(turn.excerpt), now: () => Infinity });
      view.finish({ quiet: true });
      if (turn.timings) this.used = turn.timings.cache_n + turn.timings.prompt_n + turn.timings.predicted_n;
    }
    this.togglePanel(null);
    this.showContext();
    byId("prompt").focus();
  }

  async save() {
    const { id, title, settings, turns } = this.conversation;
    const plain = JSON.parse(JSON.stringify(turns));
    await keep({ id, title, settings, turns: plain, changed: Date.now() });
  }

  /* The panel above the composer: settings or history */

  async togglePanel(which) {
    const panel = byId("panel");
    const opens = which !== null && panel.dataset.shows !== which;
    panel.dataset.shows = opens ? which : "";
    panel.hidden = !opens;
    for (const name of ["settings", "history"]) byId(name).setAttribute("aria-expanded", String(opens && name === which));
    if (!opens) return;
    if (which === "settings") panel.replaceChildren(settingsForm(this.conversation.settings, () => {}));
    else panel.replaceChildren(...(await this.historyList()));
    panel.querySelector("input, textarea, button")?.focus();
  }

  async historyList() {
    const all = await conversations();
    const again = async () => {
      byId("panel").dataset.shows = "";
      await this.togglePanel("history");
    };
    const rows = all.map((one) => {
      const open = element("button", { type: "button", onclick: () => this.open(one) }, one.title || "Untitled");
      const remove = async () => {
        await forget(one.id);
        await again();
      };
      return element("li", {}, open, element("button", { type: "button", className: "quiet", "aria-label": `Forget ${one.title}`, onclick: remove }, "✕"));
    });
    const all_ = async () => {
      await forgetAll();
      await this.open(emptyConversation());
      say("All conversations are forgotten.");
    };
    const words = all.length ? "These conversations are in this browser only." : "No conversation is kept in this browser.";
    return [element("ul", { className: "past" }, rows), element("p", { className: "muted" }, words), all.length ? element("button", { type: "button", onclick: all_ }, "Forget all") : ""];
  }

  /* The picture of an empty chat: the server's last request */

  async showLastRequest() {
    if (this.views.length > 0) return;
    const live = this.engine.recording?.lanes.findLast((lane) => lane.own && lane.end < Infinity && lane.ticks.length > 1);
    try {
      const found = live ?? (await newestLane());
      if (!found) {
        put(byId("seam-of"), "No request has been answered yet: the first one will be drawn here.");
        return;
      }
      this.lastRequest = found;
      put(byId("seam-of"), `The last request of this server: ${plural(found.prompt, "token")} computed or cached, ${number(found.written)} written.`);
      const share = (found.first - found.begun) / (found.end - found.begun);
      byId("welcome").querySelector(".seam").style.setProperty("--seam", Math.min(0.75, Math.max(0.2, share)).toFixed(3));
      this.paintSeam();
    } catch {
      // Without it the page is complete; the line under the header says what is wrong.
    }
  }

  drawSeam(context, width, height) {
    const lane = this.lastRequest;
    if (!lane) return;
    const scale = scaleOf(lane.begun, lane.end, 0, width);
    drawLane(context, lane, scale, 16, height - 18, Infinity);
    const x = scale(lane.first);
    label(context, "first token", x, 11, { align: x < 40 ? "left" : x > width - 40 ? "right" : "center" });
  }
}

const emptyConversation = () => ({ id: crypto.randomUUID?.() ?? String(Math.random()), title: "", settings: {}, turns: [] });

/** Files as named parts, then the question. */
function parts(files, question) {
  const texts = files.map(({ name, text }) => ({ type: "text", text: `${name}:\n\n${text}\n\n`, part: name }));
  return question ? [...texts, { type: "text", text: question }] : texts;
}

/** The lane of the key's newest finished request, from its timeline. */
async function newestLane() {
  const { data } = await (await ask("v1/requests")).json();
  const newest = data.find((one) => one.finished && one.output_tokens > 1);
  return newest ? laneFromTimeline(await getJson(`v1/requests/${encodeURIComponent(newest.id)}/timeline`)) : null;
}

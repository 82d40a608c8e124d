// What a model wrote, piece by piece, and its picture as text: Markdown, thinking, calls of tools.

import { element, ms, plural, put } from "./dom.js";
import { markdown } from "./markdown.js";

// A long text is parsed again at most as often as leaves nine tenths of the time to everything else.
const RENDER_SHARE = 0.1;

/** The pieces of an answer as its stream brought them. */
export class Answer {
  constructor(saved = {}) {
    this.pieces = saved.pieces ?? []; // {kind: "text" | "thinking", text, upto}: `upto` counts tokens
    this.calls = saved.calls ?? []; // {id, name, arguments, result}
    this.tokens = saved.tokens ?? 0;
  }

  /** Add a part of the stream: OpenAI's `delta`, and how many tokens it has. */
  add(delta, tokens) {
    this.tokens += tokens;
    const thinking = delta.reasoning_content ?? delta.reasoning;
    if (thinking) this.pieces.push({ kind: "thinking", text: thinking, upto: this.tokens });
    if (delta.content) this.pieces.push({ kind: "text", text: delta.content, upto: this.tokens });
    for (const part of delta.tool_calls ?? []) {
      const call = (this.calls[part.index ?? this.calls.length] ??= { id: "", name: "", arguments: "", result: null });
      call.id = part.id ?? call.id;
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
  }

  /** The text of one kind among the first tokens. */
  text(kind = "text", upto = Infinity) {
    return this.pieces.reduce((sum, piece) => (piece.kind === kind && piece.upto <= upto ? sum + piece.text : sum), "");
  }
}

/** The elements of an answer, which follow its pieces. */
export class AnswerView {
  /** @param answerCall called with a call and the result that the reader typed for it */
  constructor(answer, answerCall) {
    this.answer = answer;
    this.answerCall = answerCall;
    this.thought = element("details", { className: "fold", hidden: true }, element("summary"), element("div"));
    this.body = element("div", { className: "answer by-draft", "aria-live": "off" });
    this.calls = element("div", { hidden: true });
    this.element = element("div", {}, this.thought, this.body, this.calls);
    this.shown = -1;
    this.coloured = null;
    this.cost = 0;
    this.renderedAt = 0;
  }

  /**
   * Show what was written up to a number of tokens.
   *
   * @param colours for each position of the text `{free, gap}`, or null while it grows
   */
  show(upto, { colours = null, done = false, thinkingMs = null } = {}) {
    const shown = Math.min(upto, this.answer.tokens);
    if (shown === this.shown && colours === this.coloured && !done) return;
    const now = performance.now();
    if (!done && now - this.renderedAt < this.cost / RENDER_SHARE) return;
    this.shown = shown;
    this.coloured = colours;
    this.renderedAt = now;
    this.showThinking(shown, done, thinkingMs);
    const source = this.answer.text("text", upto);
    this.body.replaceChildren(...markdown(source, colours ? colouredLeaf(this.answer, colours) : undefined));
    if (done) this.showCalls();
    this.cost = performance.now() - now;
  }

  showThinking(upto, done, thinkingMs) {
    const text = this.answer.text("thinking", upto);
    this.thought.hidden = text === "";
    if (text === "") return;
    const tokens = this.answer.pieces.findLast((piece) => piece.kind === "thinking").upto;
    const after = thinkingMs === null ? "" : `; the answer began after ${ms(thinkingMs)}`;
    put(this.thought.firstChild, done ? `Thought for ${plural(tokens, "token")}${after}` : `Thinks: ${plural(Math.min(upto, tokens), "token")}`);
    put(this.thought.lastChild, text);
  }

  showCalls() {
    this.calls.hidden = this.answer.calls.length === 0;
    this.calls.replaceChildren(
      ...this.answer.calls.map((call) => {
        const result = element("textarea", { className: "code", "aria-label": `Result of ${call.name}`, value: call.result ?? "", readOnly: call.result !== null });
        const form = element("form", {}, result, call.result === null ? element("button", {}, "Give this result") : null);
        form.onsubmit = (event) => {
          event.preventDefault();
          this.answerCall(call, result.value);
        };
        const name = element("summary", {}, "Calls ", element("code", {}, call.name));
        return element("details", { className: "fold", open: call.result === null }, name, element("pre", {}, pretty(call.arguments)), form);
      }),
    );
  }

  set live(phase) {
    if (phase) this.body.dataset.live = phase;
    else delete this.body.dataset.live;
  }
}

/** JSON with line breaks; any other text as it is. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Makes text nodes whose pieces are coloured: by drafts (`free`) and by the gap before them. */
function colouredLeaf(answer, colours) {
  const pieces = answer.pieces.filter((piece) => piece.kind === "text");
  const starts = [];
  pieces.reduce((at, piece) => (starts.push(at), at + piece.text.length), 0);
  return (text, at) => {
    const nodes = [];
    let i = Math.max(0, starts.findLastIndex((start) => start <= at));
    for (let from = at; from < at + text.length; i += 1) {
      const end = Math.min(at + text.length, starts[i + 1] ?? Infinity);
      const source = text.slice(from - at, end - at);
      // The space before a word is not part of what is marked.
      const space = /^\s*/.exec(source)[0];
      if (space) nodes.push(document.createTextNode(space));
      const words = element("i", {}, source.slice(space.length));
      const { free, gap } = colours(pieces[i]);
      if (free) words.className = "free";
      words.style.setProperty("--gap", gap.toFixed(3));
      nodes.push(words);
      from = end;
    }
    return nodes;
  };
}

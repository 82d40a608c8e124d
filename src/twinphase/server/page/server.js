// The server as the page talks to it: JSON, streams of events, errors, the key, and the feed.

const KEY = "twinphase-key"; // in sessionStorage: gone with the tab, never in an address or a file

/** An answer that is an error: the server's sentences, its status, and when to ask again. */
export class ServerError extends Error {
  constructor(message, status, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter; // seconds
  }
}

let keyWanted = () => {};

/** What to do when the server asks for a key; the page shows the field. */
export function onKeyWanted(ask) {
  keyWanted = ask;
}

export function useKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/**
 * A request to this server, with the key where there is one.
 *
 * @throws {ServerError} the server refused it, or there is none (status 0)
 */
export async function ask(path, { body, signal, headers = {} } = {}) {
  const key = sessionStorage.getItem(KEY);
  const sent = { ...headers };
  if (key) sent.authorization = `Bearer ${key}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  let reply;
  try {
    reply = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined ? undefined : JSON.stringify(body),
      headers: sent,
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Check that it runs.", 0);
  }
  if (reply.ok) return reply;
  if (reply.status === 401) keyWanted();
  const retryAfter = Number(reply.headers.get("retry-after"));
  throw new ServerError(await errorText(reply), reply.status, retryAfter > 0 ? retryAfter : null);
}

async function errorText(reply) {
  const text = await reply.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 500) || `The server answered ${reply.status}.`;
  }
}

export const getJson = async (path, options) => (await ask(path, options)).json();

/**
 * The events of a stream (https://html.spec.whatwg.org/multipage/server-sent-events.html), as
 * `{event, data, id}`; `data` is text. Comments are skipped, but `onBytes` sees that the stream lives.
 */
export async function* serverSentEvents(reply, onBytes = () => {}) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let found = { event: "message", data: [], id: undefined };
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      onBytes();
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const text of lines) {
        if (text === "") {
          if (found.data.length) yield { ...found, data: found.data.join("\n") };
          found = { event: "message", data: [], id: undefined };
          continue;
        }
        const colon = text.indexOf(":");
        if (colon === 0) continue;
        const field = colon < 0 ? text : text.slice(0, colon);
        const content = colon < 0 ? "" : text.slice(colon + 1).replace(/^ /, "");
        if (field === "data") found.data.push(content);
        else if (field === "event") found.event = content;
        else if (field === "id") found.id = content;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Ask a chat and read its stream.
 *
 * @param body of POST /v1/chat/completions, without what the stream needs
 * @param seen called with each part: `{id}`, `{progress}`, `{delta, tokens}`, `{finish, timings}`,
 *   `{usage}`
 * @throws {ServerError} refused, or broken off
 */
export async function streamChat(body, seen, signal) {
  const whole = { ...body, stream: true, return_progress: true, return_token_ids: true, stream_options: { include_usage: true } };
  const reply = await ask("v1/chat/completions", { body: whole, signal });
  seen({ id: reply.headers.get("x-request-id") });
  let complete = false;
  for await (const { data } of serverSentEvents(reply)) {
    if (data === "[DONE]") {
      complete = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, Number(chunk.error.code) || 500);
    if (chunk.prompt_progress) seen({ progress: chunk.prompt_progress });
    if (chunk.usage) seen({ usage: chunk.usage });
    const [choice] = chunk.choices ?? [];
    if (choice === undefined) continue;
    seen({ delta: choice.delta ?? {}, tokens: choice.token_ids?.length ?? 0 });
    if (choice.finish_reason) seen({ finish: choice.finish_reason, timings: choice.timings ?? chunk.timings });
  }
  if (!complete) throw new ServerError("The answer broke off. Ask again.", 0);
}

const FIRST_WAIT_SECONDS = 1;
const LONGEST_WAIT_SECONDS = 15;
// The server comments every 15 s; what is silent for longer is dead, though no socket says so.
const SILENCE_SECONDS = 40;
const LOADING_POLL_SECONDS = 0.7;

export class Feed {
  /**
   * @param {(event: object) => void} onEvent an event of the stream
   * @param {(state: object) => void} onState `{kind: "connected" | "loading" | "lost" | "refused" | "hidden"}`
   *   with `stage` (loading), `seconds` (until the next try) and `message`
   */
  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.lastId = null;
    this.failures = 0;
    this.controller = null;
    this.timer = 0;
    this.ended = false; // the server has no feed for this page; only `restart` tries again
    document.addEventListener("visibilitychange", () => (document.hidden ? this.pause() : this.restart()));
    addEventListener("online", () => this.restart());
  }

  /** Connect now, whatever it waited for. */
  restart() {
    clearTimeout(this.timer);
    this.controller?.abort();
    this.ended = false;
    this.connect();
  }

  pause() {
    clearTimeout(this.timer);
    this.controller?.abort();
    this.controller = null;
    this.onState({ kind: "hidden" });
  }

  async connect() {
    const controller = new AbortController();
    this.controller = controller;
    try {
      await this.untilReady(controller.signal);
      const headers = this.lastId === null ? {} : { "last-event-id": this.lastId };
      const reply = await ask("v1/engine/events", { headers, signal: controller.signal });
      await this.read(reply, controller);
      throw new ServerError("The stream ended.", 0);
    } catch (error) {
      if (controller !== this.controller) return; // replaced or paused
      this.failed(error);
    }
  }

  /** Wait while the model loads, and report its stage. */
  async untilReady(signal) {
    for (;;) {
      const state = await (await fetch("health/live", { signal, cache: "no-store", credentials: "omit" })).json();
      if (state.status === "ready") return;
      this.onState({ kind: "loading", stage: state.status ?? state.stage ?? "" });
      await new Promise((resolve) => setTimeout(resolve, 1000 * LOADING_POLL_SECONDS));
    }
  }

  async read(reply, controller) {
    let watchdog = 0;
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => controller.abort(), 1000 * SILENCE_SECONDS);
    };
    alive();
    try {
      this.failures = 0;
      this.onState({ kind: "connected" });
      for await (const { data, id } of serverSentEvents(reply, alive)) {
        if (id !== undefined) this.lastId = id;
        this.onEvent(JSON.parse(data));
      }
    } finally {
      clearTimeout(watchdog);
    }
  }

  failed(error) {
    const refused = error instanceof ServerError && error.status >= 400 && error.status < 500 && error.status !== 429;
    if (refused) {
      this.ended = true;
      this.onState({ kind: "refused", status: error.status, message: error.message });
      return;
    }
    const growing = Math.min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** this.failures);
    const seconds = error.retryAfter ?? growing;
    this.failures += 1;
    this.onState({ kind: "lost", seconds, message: error.status ? error.message : "" });
    this.timer = setTimeout(() => this.connect(), 1000 * seconds);
  }
}

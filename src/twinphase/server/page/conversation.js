// A conversation's settings, and where conversations are kept: in this browser only (IndexedDB).

import { element } from "./dom.js";

// Name, what it is called, and how its text becomes the value of a request's field.
const NUMBERS = [
  ["temperature", "Temperature", Number],
  ["top_p", "Top p", Number],
  ["top_k", "Top k", Number],
  ["min_p", "Min p", Number],
  ["repetition_penalty", "Repetition penalty", Number],
  ["max_tokens", "Maximum tokens", Number],
  ["seed", "Seed", Number],
  ["thinking_token_budget", "Thinking budget", Number],
];
const TEXTS = [
  ["system", "System prompt", ""],
  ["schema", "JSON schema of the answer", '{"type": "object", "properties": {"name": {"type": "string"}}}'],
  ["tools", "Tools, as OpenAI's list", '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'],
];

/** A setting that is not what it has to be; its message says which. */
export class SettingError extends Error {}

/**
 * The form.
 *
 * @param settings texts by name; an empty one is the server's default
 * @param changed called after each change
 */
export function settingsForm(settings, changed) {
  const field = (name, words, input, className = "") => {
    input.value = settings[name] ?? "";
    input.oninput = () => {
      settings[name] = input.value;
      changed();
    };
    return element("label", { className }, words, input);
  };
  const rows = NUMBERS.map(([name, words]) => field(name, words, element("input", { inputMode: "decimal", placeholder: "default", autocomplete: "off" })));
  const areas = TEXTS.map(([name, words, example]) =>
    field(name, words, element("textarea", { placeholder: example, spellcheck: name === "system", className: name === "system" ? "" : "code" }), "across"),
  );
  return element("div", { className: "fields" }, areas[0], rows, areas.slice(1));
}

/**
 * The fields of POST /v1/chat/completions that the settings ask for.
 *
 * @throws {SettingError} one cannot be read
 */
export function requestFields(settings) {
  const fields = {};
  for (const [name, words, read] of NUMBERS) {
    const text = (settings[name] ?? "").trim();
    if (text === "") continue;
    const value = read(text.replace(",", "."));
    if (!Number.isFinite(value)) throw new SettingError(`${words} is not a number: ${text}. Change it in the settings, or empty it for the default.`);
    fields[name] = value;
  }
  const schema = parsed(settings.schema, "The JSON schema");
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = parsed(settings.tools, "The list of tools");
  if (tools) fields.tools = tools;
  return fields;
}

function parsed(text, words) {
  if (!text?.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingError(`${words} is not valid JSON: ${error.message}. Correct it in the settings, or empty it.`);
  }
}

const NAME = "twinphase";
const CONVERSATIONS = "conversations";

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Run one request in a transaction of its own, which is done when the promise resolves. */
async function transact(mode, ask) {
  const database = await open();
  try {
    return await new Promise((resolve, reject) => {
      const transaction = database.transaction(CONVERSATIONS, mode);
      const request = ask(transaction.objectStore(CONVERSATIONS));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error);
    });
  } finally {
    database.close();
  }
}

/** Keep a conversation: `{id, title, changed, turns}`. A browser that keeps nothing is no error. */
export async function keep(conversation) {
  try {
    await transact("readwrite", (store) => store.put(conversation));
    return true;
  } catch {
    return false;
  }
}

/** All conversations, newest first; none where the browser keeps nothing. */
export async function conversations() {
  try {
    const found = await transact("readonly", (store) => store.getAll());
    return found.sort((a, b) => b.changed - a.changed);
  } catch {
    return [];
  }
}

export const forget = (id) => transact("readwrite", (store) => store.delete(id));
export const forgetAll = () => transact("readwrite", (store) => store.clear());

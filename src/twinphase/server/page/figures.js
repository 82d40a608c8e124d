// Figures made of elements: the fall of the ledger, gauges, and what would make a request faster.

import { element, measured, ms, number, percent, plural } from "./dom.js";

/** The ledger's kinds in plain words, with the role of their colour. */
const KINDS = {
  tokenize: ["tokenizing", "neutral"],
  route: ["choosing a worker", "moved"],
  transfer: ["moving its KV blocks", "moved"],
  queue: ["waiting in the queue", "neutral"],
  prefill: ["prefill of its prompt", "prefill"],
  prefill_wait: ["waiting beside others' steps", "prefill2"],
  recompute: ["prefill again after preemption", "prefill2"],
  drafting: ["drafting", "decode2"],
  decode: ["decode of its answer", "decode"],
  rejected: ["rejected drafts", "decode3"],
  batching: ["others' answers beside it", "decode2"],
  stall: ["stalled by others' prompts", "prefill2"],
  detokenize: ["tokens to text", "neutral"],
  send: ["handing text over", "neutral"],
  unattributed: ["unattributed", "neutral"],
};
const BOUNDS = {
  compute: "bound by compute",
  memory: "bound by memory bandwidth",
  contention: "held up by other programs",
  ranks: "held up by other ranks",
  overhead: "bound by work outside kernels",
  kernels: "below its kernels' peak",
};
const SMALL_SHARE = 0.004;

/**
 * Rows of a name, a bar and two texts, as a table that a screen reader reads.
 *
 * @param rows `{name, from, share, colour, value, more, sum}`; `from` and `share` are fractions
 */
export function bars(title, rows) {
  return element(
    "div",
    { className: "fall", role: "table", "aria-label": title },
    rows.map((row) => {
      const bar = element("span");
      bar.style.left = `${100 * row.from}%`;
      bar.style.width = `${100 * row.share}%`;
      bar.style.background = `var(--${row.colour})`;
      return element(
        "div",
        { role: "row", className: row.sum ? "sum" : "" },
        element("span", { role: "rowheader" }, row.name),
        element("span", { className: "track", role: "cell" }, row.share > 0 && !row.sum ? bar : ""),
        element("span", { className: "n", role: "cell" }, row.value),
        element("span", { className: "n muted", role: "cell" }, row.more),
      );
    }),
  );
}

/** The ledger as a fall: each part begins where the one before ended; they add up to the wall time. */
export function fall(ledger) {
  const entries = Object.entries(ledger);
  const total = entries.reduce((sum, [, value]) => sum + value, 0);
  const rows = [];
  let from = 0;
  let small = 0;
  let smallCount = 0;
  for (const [kind, value] of entries) {
    const share = total > 0 ? value / total : 0;
    if (share < SMALL_SHARE) {
      small += value;
      smallCount += value > 0 ? 1 : 0;
    } else {
      const [name, colour] = KINDS[kind] ?? [kind, "neutral"];
      rows.push({ name, from: from / total, share, colour, value: measured(value), more: percent(share) });
    }
    from += value;
  }
  if (smallCount > 0) {
    const share = small / total;
    const name = plural(smallCount, "smaller part");
    rows.push({ name, from: 1 - share, share, colour: "neutral", value: measured(exact(small)), more: percent(share) });
  }
  rows.push({ name: "all of it", from: 0, share: 1, colour: "neutral", value: measured(exact(total)), more: "100 %", sum: true });
  return bars(`Where ${ms(total)} went`, rows);
}

/** A sum of values with three decimals, without the rounding error of adding them. */
export const exact = (sum) => Math.round(1000 * sum) / 1000;

/** The parts of a prompt by what they cost. */
export function promptParts(parts) {
  const most = Math.max(...parts.map((part) => part.prefill_ms ?? 0), 0.001);
  const byCost = [...parts].sort((a, b) => (b.prefill_ms ?? 0) - (a.prefill_ms ?? 0));
  return bars(
    "What the parts of the prompt cost",
    byCost.map((part) => ({
      name: part.name,
      from: 0,
      share: (part.prefill_ms ?? 0) / most,
      colour: "prefill",
      value: part.computed_tokens ? measured(part.prefill_ms) : "cached",
      more: plural(part.tokens, "token") + (part.cached_tokens && part.computed_tokens ? `, ${number(part.cached_tokens)} cached` : ""),
    })),
  );
}

/** A half circle that says how much of a limit was reached; "?" where that is unknown. */
export function gauge(name, value, phase, words) {
  const svg = shape("svg", { viewBox: "0 0 100 58", "aria-hidden": "true" });
  const arc = (to, role) => {
    const angle = Math.PI * (1 - to);
    const end = `${50 + 42 * Math.cos(angle)} ${50 - 42 * Math.sin(angle)}`;
    const path = shape("path", { d: `M8 50 A42 42 0 0 1 ${end}`, fill: "none", "stroke-width": 7, "stroke-linecap": "round" });
    path.style.stroke = `var(--${role})`;
    svg.append(path);
  };
  arc(1, "grid");
  if (value > 0.004) arc(Math.min(1, value), phase);
  const text = shape("text", { x: 50, y: 50 });
  text.textContent = value === null || value === undefined ? "?" : percent(value);
  svg.append(text);
  const said = value === null || value === undefined ? "unknown" : percent(value);
  return element("figure", { role: "img", "aria-label": `${name} ${words}: ${said}` }, svg, element("figcaption", {}, element("b", {}, name), ` ${words}`));
}

/** What bound each phase, as a sentence that another one can follow. */
export function boundSentence(bounds) {
  const held = Object.entries(bounds ?? {}).filter(([, bound]) => BOUNDS[bound]);
  const words = held.map(([phase, bound]) => `${phase} is ${BOUNDS[bound]}`).join(", ");
  return words ? `${words[0].toUpperCase()}${words.slice(1)}. ` : "What bounds it is unknown. ";
}

function shape(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** What would make a request faster, best first, as `explain` ranked it; its times are in seconds. */
export function levers(found) {
  return element(
    "ol",
    { className: "levers" },
    found.map((lever) => {
      const saved = lever.saved_seconds;
      const gain = saved === null ? "not known" : ms(1000 * saved);
      const more = saved !== null ? "less" : lever.addressed_seconds ? `works on ${ms(1000 * lever.addressed_seconds)}` : "";
      const flag = lever.flag.startsWith("--") ? [element("code", {}, lever.flag), " "] : [];
      return element("li", {}, element("span", { className: "gain" }, gain, " ", element("small", {}, more)), element("span", {}, flag, lever.advice));
    }),
  );
}

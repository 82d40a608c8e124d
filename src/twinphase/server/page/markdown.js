// Markdown as nodes: paragraphs, headings, lists, quotes, tables, code, emphasis and links.
//
// There is no HTML in between: the parser makes elements and text nodes, so that an answer cannot
// bring markup into the page. Each text node knows where in the answer it stands (`leaf`), so that
// tokens can be coloured inside formatted text.

import { element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const BULLET = /^( {0,3})([-*+])(\s+)(?=\S)/;
const ORDERED = /^( {0,3})(\d{1,9})([.)])(\s+)(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const ESCAPED = /[!"#$%&'()*+,\-./:;<=>?@[\\\]^_`{|}~]/;
const MAX_DEPTH = 12;

/** A line of the source, and the position of its first character in it. */
const line = (text, at) => ({ text, at });
const cut = ({ text, at }, count) => line(text.slice(count), at + count);
const indentOf = ({ text }) => text.length - text.trimStart().length;
const isBlank = ({ text }) => text.trim() === "";

/**
 * The nodes of a text in Markdown.
 *
 * @param {string} source the text, complete or so far
 * @param {(text: string, at: number) => Node[]} leaf makes the nodes of plain text that begins at a
 *   position of the source; by default one text node
 * @returns {Node[]}
 */
export function markdown(source, leaf = (text) => [document.createTextNode(text)]) {
  let at = 0;
  const lines = source.split("\n").map((text) => {
    const found = line(text, at);
    at += text.length + 1;
    return found;
  });
  return blocks(lines, leaf, 0);
}

function blocks(lines, leaf, depth) {
  const found = [];
  let position = 0;
  while (position < lines.length) {
    const here = lines[position];
    if (isBlank(here)) {
      position += 1;
      continue;
    }
    const maker = depth < MAX_DEPTH ? BLOCKS.find((one) => one.begins(lines, position)) : undefined;
    const [nodes, next] = (maker ?? PARAGRAPH).make(lines, position, leaf, depth);
    found.push(...nodes);
    position = next;
  }
  return found;
}

const FENCED = {
  begins: (lines, position) => FENCE.test(lines[position].text),
  make(lines, position, leaf) {
    const [, mark, language] = FENCE.exec(lines[position].text);
    let end = position + 1;
    const closes = ({ text }) => text.trim().startsWith(mark) && text.trim().replaceAll(mark[0], "") === "";
    while (end < lines.length && !closes(lines[end])) end += 1;
    const inside = lines.slice(position + 1, end);
    const code = element("code", {}, inside.flatMap(({ text, at }) => leaf(`${text}\n`, at)));
    const name = language.trim().split(/\s/)[0];
    return [[element("pre", { tabIndex: 0, "aria-label": name ? `Code, ${name}` : "Code" }, code)], end + 1];
  },
};

const TITLE = {
  begins: (lines, position) => HEADING.test(lines[position].text),
  make(lines, position, leaf) {
    const [, marks, title] = HEADING.exec(lines[position].text);
    const start = lines[position].text.indexOf(title, marks.length);
    // The page has its own two levels of headings above an answer's.
    const level = Math.min(6, marks.length + 2);
    return [[element(`h${level}`, {}, inline([line(title, lines[position].at + start)], leaf))], position + 1];
  },
};

const SEPARATOR = {
  begins: (lines, position) => RULE.test(lines[position].text),
  make: (lines, position) => [[element("hr")], position + 1],
};

const QUOTED = {
  begins: (lines, position) => QUOTE.test(lines[position].text),
  make(lines, position, leaf, depth) {
    let end = position;
    while (end < lines.length && QUOTE.test(lines[end].text)) end += 1;
    const inside = lines.slice(position, end).map((one) => cut(one, QUOTE.exec(one.text)[0].length));
    return [[element("blockquote", {}, blocks(inside, leaf, depth + 1))], end];
  },
};

const TABLE = {
  begins: (lines, position) =>
    lines[position].text.includes("|") &&
    position + 1 < lines.length &&
    lines[position + 1].text.includes("-") &&
    TABLE_RULE.test(lines[position + 1].text) &&
    cells(lines[position]).length === cells(lines[position + 1]).length,
  make(lines, position, leaf) {
    const columns = cells(lines[position + 1]);
    const right = columns.map(({ text }) => /^:?-+:$/.test(text.trim()));
    const row = (one, tag) =>
      element("tr", {}, cells(one).map((cell, i) => element(tag, { className: right[i] ? "right" : "" }, inline([cell], leaf))));
    let end = position + 2;
    while (end < lines.length && lines[end].text.includes("|")) end += 1;
    const head = element("thead", {}, row(lines[position], "th"));
    const body = element("tbody", {}, lines.slice(position + 2, end).map((one) => row(one, "td")));
    return [[element("div", { className: "wide", tabIndex: 0 }, element("table", {}, head, body))], end];
  },
};

/** The cells of a table's row, each with its position. */
function cells(row) {
  const found = [];
  let begin = row.text.trimStart().startsWith("|") ? row.text.indexOf("|") + 1 : 0;
  const end = row.text.trimEnd().endsWith("|") ? row.text.trimEnd().length - 1 : row.text.length;
  for (let i = begin; i <= end; i += 1) {
    if (i < end && (row.text[i] !== "|" || row.text[i - 1] === "\\")) continue;
    const text = row.text.slice(begin, i);
    found.push(line(text.trim(), row.at + begin + indentOf({ text })));
    begin = i + 1;
  }
  return found;
}

const LIST = {
  begins: (lines, position) => BULLET.test(lines[position].text) || ORDERED.test(lines[position].text),
  make(lines, position, leaf, depth) {
    const ordered = ORDERED.exec(lines[position].text);
    const marker = ordered ? ORDERED : BULLET;
    const list = element(ordered ? "ol" : "ul", ordered ? { start: Number(ordered[2]) } : {});
    let at = position;
    while (at < lines.length && marker.test(lines[at].text) && !RULE.test(lines[at].text)) {
      const width = marker.exec(lines[at].text)[0].length;
      const item = [cut(lines[at], width)];
      at += 1;
      // What is indented below the item belongs to it; so does a line that continues its paragraph.
      while (at < lines.length && !startsBlock(lines, at, width)) {
        item.push(cut(lines[at], Math.min(width, indentOf(lines[at]))));
        at += 1;
      }
      while (item.length > 1 && isBlank(item.at(-1))) item.pop();
      const inside = blocks(item, leaf, depth + 1);
      const [first] = inside;
      // An item that begins with a paragraph shows it without a paragraph's space.
      const opened = first?.nodeName === "P" ? [...first.childNodes, ...inside.slice(1)] : inside;
      list.append(element("li", {}, opened));
    }
    return [[list], at];
  },
};

/** Whether a line ends a list's item whose text is indented by `width`. */
function startsBlock(lines, position, width) {
  const here = lines[position];
  if (isBlank(here)) {
    const next = lines.slice(position + 1).find((one) => !isBlank(one));
    return next === undefined || indentOf(next) < width;
  }
  if (indentOf(here) >= Math.min(width, 2) && indentOf(here) > 0) return false;
  return BLOCKS.some((one) => one.begins(lines, position)) || isBlank(lines[position - 1]);
}

const BLOCKS = [FENCED, TITLE, SEPARATOR, QUOTED, TABLE, LIST];

const PARAGRAPH = {
  make(lines, position, leaf, depth) {
    let end = position + 1;
    const continues = (at) =>
      !isBlank(lines[at]) && (depth >= MAX_DEPTH || !BLOCKS.some((one) => one.begins(lines, at)));
    while (end < lines.length && continues(end)) end += 1;
    return [[element("p", {}, inline(lines.slice(position, end), leaf))], end];
  },
};

/** The nodes of a paragraph's lines. */
function inline(lines, leaf) {
  const found = [];
  lines.forEach((one, index) => {
    if (index) found.push(...leaf("\n", one.at - 1));
    found.push(...spans(one.text, one.at, leaf, 0));
  });
  return found;
}

const MARKS = [
  { mark: "**", tag: "strong" },
  { mark: "__", tag: "strong" },
  { mark: "~~", tag: "del" },
  { mark: "*", tag: "em" },
  { mark: "_", tag: "em" },
];

/** The nodes of one line's text: code, emphasis, links; what does not close stays as it was written. */
function spans(text, at, leaf, depth) {
  const found = [];
  let plain = 0;
  let i = 0;
  const flush = (end) => {
    if (end > plain) found.push(...leaf(text.slice(plain, end), at + plain));
  };
  while (i < text.length) {
    const special = depth < MAX_DEPTH ? spanAt(text, i, at, leaf, depth) : null;
    if (special === null) {
      i += 1;
      continue;
    }
    flush(i);
    found.push(...special.nodes);
    i = special.end;
    plain = i;
  }
  flush(text.length);
  return found;
}

function spanAt(text, i, at, leaf, depth) {
  const letter = text[i];
  if (letter === "\\" && ESCAPED.test(text[i + 1] ?? "")) {
    return { nodes: leaf(text[i + 1], at + i + 1), end: i + 2 };
  }
  if (letter === "`") {
    const ticks = /^`+/.exec(text.slice(i))[0];
    const close = text.indexOf(ticks, i + ticks.length);
    if (close < 0) return null;
    const begin = i + ticks.length;
    return { nodes: [element("code", {}, leaf(text.slice(begin, close), at + begin))], end: close + ticks.length };
  }
  if (letter === "[") return linkAt(text, i, at, leaf, depth);
  for (const { mark, tag } of MARKS) {
    if (!text.startsWith(mark, i)) continue;
    const begin = i + mark.length;
    // Marks inside a word, such as in snake_case, are letters; so are marks before a space.
    if (mark[0] === "_" && /\w/.test(text[i - 1] ?? "")) continue;
    if (/\s/.test(text[begin] ?? " ")) continue;
    const close = closing(text, mark, begin);
    if (close < 0) continue;
    const nodes = spans(text.slice(begin, close), at + begin, leaf, depth + 1);
    return { nodes: [element(tag, {}, nodes)], end: close + mark.length };
  }
  return null;
}

/** Where a mark of emphasis closes, or -1. */
function closing(text, mark, from) {
  for (let close = text.indexOf(mark, from + 1); close >= 0; close = text.indexOf(mark, close + 1)) {
    const doubled = mark.length === 1 && (text[close + 1] === mark || text[close - 1] === mark);
    const insideWord = mark[0] === "_" && /\w/.test(text[close + mark.length] ?? "");
    if (!/\s/.test(text[close - 1]) && !doubled && !insideWord) return close;
  }
  return -1;
}

function linkAt(text, i, at, leaf, depth) {
  const found = /^\[([^\]]*)\]\(([^\s()]*)\)/.exec(text.slice(i));
  if (found === null) return null;
  const [whole, words, address] = found;
  const nodes = spans(words, at + i + 1, leaf, depth + 1);
  // Only addresses of the web become links; a model may write any other.
  if (!/^https?:\/\//i.test(address)) return { nodes: [...nodes, ...leaf(` (${address})`, at + i + words.length + 2)], end: i + whole.length };
  const link = element("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank" }, nodes);
  return { nodes: [link], end: i + whole.length };
}

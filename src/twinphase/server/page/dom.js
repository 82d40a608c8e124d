// Elements, words and canvases: small helpers of every view. Nothing here knows what a request is.

export const byId = (id) => document.getElementById(id);

/**
 * An element with properties, attributes and children.
 *
 * Keys with a dash, and `role`, become attributes; functions named `on...` become listeners. Text
 * always becomes text nodes, never markup, so that nothing a model writes can become part of the page.
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.includes("-") || name === "role" || name === "for") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

/** A measured value: shown rounded, with the exact one as its title and its machine-readable value. */
export function measured(value, phase = "") {
  if (value === null || value === undefined) return element("span", { className: phase }, "?");
  return element("data", { className: phase, value: String(value), title: `${value} ms` }, ms(value));
}

/** Milliseconds for people: "5.75 s", "188 ms", "67.2 ms"; "?" where nothing is known. */
export function ms(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "?";
  if (value >= 59950) return `${Math.floor(value / 60000)} min ${Math.round((value % 60000) / 1000)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return value >= 99.95 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`;
}

export const number = (value) => Math.round(value).toLocaleString("en");
export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

/** A fraction as a percentage; "unknown" where it is not known. */
export function percent(fraction) {
  if (fraction === null || fraction === undefined) return "unknown";
  return `${fraction < 0.095 ? (100 * fraction).toFixed(1) : Math.round(100 * fraction)} %`;
}

/** "a, b and c". */
export function listed(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

/** Set a text only when it changes: a screen reader and the layout notice every assignment. */
export function put(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Say a sentence to screen readers. */
export function say(sentence) {
  put(byId("say"), sentence);
}

/** Give a text file to the reader of the page. */
export function download(name, blob) {
  const link = element("a", { download: name, href: URL.createObjectURL(blob) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Whether the reader asked for less motion. */
export const prefersStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

const ROLES = [
  "prefill", "prefill2", "decode", "decode2", "decode3", "moved", "text", "muted", "grid", "neutral", "surface", "page",
];

/** The page's colours by role, as the canvas wants them; `readPalette` fills it. */
export const palette = { font: "sans-serif", hatch: null };
const sheets = new Set();

/** Read the colours of page.css as they are now, light or dark, and paint every canvas again. */
export function readPalette() {
  const probe = document.body.appendChild(element("i"));
  for (const role of ROLES) {
    probe.style.color = `var(--${role})`;
    palette[role] = getComputedStyle(probe).color;
  }
  palette.font = getComputedStyle(probe).fontFamily;
  probe.remove();
  palette.hatch = hatching(palette.prefill);
  for (const paint of sheets) paint();
}

/** A tile of diagonal lines: tokens that came from the cache. */
function hatching(colour) {
  const tile = element("canvas", { width: 5, height: 5 });
  const context = tile.getContext("2d");
  context.strokeStyle = colour;
  context.lineWidth = 1.1;
  context.beginPath();
  for (const offset of [-5, 0, 5]) {
    context.moveTo(offset, 5);
    context.lineTo(offset + 5, 0);
  }
  context.stroke();
  return tile;
}

/**
 * A function that paints a canvas at the size it has, and again whenever that size changes.
 *
 * @param {(context: CanvasRenderingContext2D, width: number, height: number) => void} paint
 */
export function sheet(canvas, paint) {
  const context = canvas.getContext("2d");
  const again = () => {
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width || !height || palette.text === undefined) return;
    const ratio = devicePixelRatio || 1;
    const across = Math.round(width * ratio);
    const down = Math.round(height * ratio);
    if (canvas.width !== across || canvas.height !== down) {
      canvas.width = across;
      canvas.height = down;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    paint(context, width, height);
  };
  const observer = new ResizeObserver(again);
  observer.observe(canvas);
  sheets.add(again);
  /** A canvas that leaves the page is forgotten. */
  again.forget = () => {
    observer.disconnect();
    sheets.delete(again);
  };
  return again;
}

// The page that `twinphase explain --out` writes: one explanation, which it carries itself.
//
// `commands/explain_page.py` puts this module and those that it imports into one script.

import { byId, element, measured, ms, percent, readPalette, sheet } from "./dom.js";
import { drawClock, drawLane, scaleOf } from "./draw.js";
import { boundSentence, fall, gauge, levers } from "./figures.js";
import { laneFromTimeline } from "./lane.js";

const LANE_HEIGHT = 36;
const LANE_TOP = 22;

/** A request's lane on a clock that begins with its arrival. */
function drawn(lane) {
  const canvas = element("canvas", { role: "img", "aria-label": "Its prefill and its decode on one clock" });
  canvas.style.height = `${LANE_TOP + LANE_HEIGHT + 4}px`;
  sheet(canvas, (context, width, height) => {
    const scale = scaleOf(0, lane.end, 0, width);
    drawClock(context, scale, 0, height);
    drawLane(context, lane, scale, LANE_TOP, LANE_HEIGHT, Infinity);
  });
  return canvas;
}

function headline({ wall_ms: wall, first_token_ms: first, tpot_ms: tpot, num_requests: count }) {
  if (count !== undefined) return element("p", {}, `${count} requests as a client saw them, `, measured(wall), " each on average.");
  const pace = tpot === null ? [] : [", then ", measured(tpot, "d"), " per token"];
  return element("p", {}, measured(wall), " in all, first token after ", measured(first, "p"), pace, ".");
}

/** Causes of one phase, with their share of what it took. */
function causes(diagnoses, phase) {
  const rows = diagnoses.filter((one) => one.phase === phase);
  return rows.map(({ cause, share, evidence }) =>
    element("p", {}, element("b", { className: phase[0] }, cause.replaceAll("_", " ")), share === null ? ": " : ` (${percent(share)}): `, evidence),
  );
}

function limits({ efficiency, bounds }) {
  if (!efficiency) return [];
  const near = Object.entries(efficiency);
  const gauges = near.flatMap(([phase, { mfu, mbu }]) => [
    gauge("MFU", mfu, phase, `of the arithmetic, in ${phase}`),
    gauge("MBU", mbu, phase, `of the bandwidth, in ${phase}`),
  ]);
  return [element("div", { className: "gauges" }, gauges), element("p", { className: "muted" }, boundSentence(bounds))];
}

const part = (title, content) => (content.length ? element("div", {}, element("h3", {}, title), content) : null);
const sentences = (list) => list.map((text) => element("p", {}, text));

function show(found, timeline) {
  const lane = timeline && laneFromTimeline(timeline);
  document.title = found.id;
  byId("explained").append(
    element("h1", {}, found.id),
    headline(found),
    element(
      "div",
      { className: "why" },
      lane ? drawn(lane) : null,
      part("Where the time went", [fall(found.ledger_ms)]),
      part("What bound each phase", limits(found)),
      part(`Why the first token took ${ms(found.first_token_ms)}`, causes(found.diagnoses, "prefill")),
      part(found.tpot_ms === null ? "Why the tokens after it took as long as they did" : `Why each token after it took ${ms(found.tpot_ms)}`, causes(found.diagnoses, "decode")),
      part("Had it run alone", sentences(found.alone)),
      part("What the server itself says", sentences(found.claims)),
      part("Unknown from outside", sentences(found.unknown)),
      part("What to change", found.levers.length ? [levers(found.levers)] : []),
    ),
  );
  globalThis.twinphase = { found, lane };
  readPalette();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readPalette);
}

const { found, timeline } = JSON.parse(byId("found").textContent);
show(found, timeline);

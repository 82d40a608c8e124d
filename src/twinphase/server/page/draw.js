// Draws decoded recordings. It keeps no state of a view: each function takes what it draws, a scale
// and a moment, so that the chat, the engine's time line and the lessons share one picture language.
//
// One rule for all of them: prefill is blue, decode is orange, and time that an answer waited for
// another prompt is blue inside orange. Estimates are lighter than facts.

import { ms, palette } from "./dom.js";

const ESTIMATE = 0.35;

function box(context, colour, x, y, width, height, alpha = 1) {
  context.globalAlpha = alpha;
  context.fillStyle = colour;
  context.fillRect(x, y, width, height);
  context.globalAlpha = 1;
}

export function label(context, text, x, y, { colour = palette.muted, align = "left", size = 11.5 } = {}) {
  context.font = `${size}px ${palette.font}`;
  context.textAlign = align;
  context.fillStyle = colour;
  context.fillText(text, x, y);
}

function hatched(context, x, y, width, height) {
  box(context, palette.prefill, x, y, width, height, 0.1);
  context.fillStyle = context.createPattern(palette.hatch, "repeat");
  context.fillRect(x, y, width, height);
}

function dashed(context, colour, pattern, x1, y1, x2, y2, width = 1) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.setLineDash(pattern);
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
  context.setLineDash([]);
}

/** Accepted drafts: a dot for each, upwards. */
function dots(context, count, x, y) {
  context.fillStyle = palette.decode;
  for (let i = 0; i < count; i += 1) {
    context.beginPath();
    context.arc(x, y - 4 * i, 1.4, 0, 7);
    context.fill();
  }
}

/** The clock above a time line: hairlines at round moments between `from` and `to` of the scale. */
export function drawClock(context, scale, top, bottom, { zero = 0, ends = false } = {}) {
  const span = scale.to - scale.from;
  const every = [10, 25, 50, 100, 250, 500, 1000, 2000, 5000, 10000, 30000, 60000].find(
    (step) => (step / span) * (scale.right - scale.left) > 70,
  ) ?? 10 ** Math.ceil(Math.log10(span / 8));
  for (let t = Math.ceil((scale.from - zero) / every) * every; t + zero <= scale.to; t += every) {
    const x = Math.min(scale(t + zero), scale.right - 1);
    box(context, palette.grid, x, ends ? top : top + 16, 1, bottom - top - 16, 0.9);
    const text = every < 1000 ? (t / 1000).toFixed(every < 100 ? 3 : every === 250 || every < 500 ? 2 : 1) : `${t / 1000} s`;
    const align = x < scale.left + 12 ? "left" : x > scale.right - 20 ? "right" : "center";
    label(context, t === 0 && ends ? "0" : text, x, ends ? bottom - 3 : top + 11, { align, size: 11 });
  }
}

/** A scale from milliseconds to pixels, which knows its ends and its inverse. */
export function scaleOf(from, to, left, right) {
  const perPixel = (right - left) / (to - from);
  const scale = (t) => left + (t - from) * perPixel;
  return Object.assign(scale, { from, to, left, right, back: (x) => from + (x - left) / perPixel });
}

/**
 * One request on a clock: queued, cached, chunks, the first token, ticks.
 *
 * @param lane a lane of a recording
 * @param scale from `scaleOf`
 * @param now the moment of the picture: nothing later is drawn
 */
export function drawLane(context, lane, scale, y, height, now, { faint = false } = {}) {
  if (now < lane.at) return;
  const strength = faint ? ESTIMATE : 1;
  const place = { mid: y + height / 2, top: y + height * 0.16, tall: height * 0.68 };
  for (const [start, end] of lane.waits) {
    if (start < now) dashed(context, palette.neutral, [1.5, 3.5], scale(start), place.mid, scale(Math.min(now, end)), place.mid, 1.5);
  }
  if (now < lane.begun) return;
  drawChunks(context, lane, scale, place, now, strength);
  drawTicks(context, lane, scale, place, now, strength);
  drawTransfer(context, lane, scale, place, now);
  if (now >= lane.first) box(context, palette.text, scale(lane.first) - 1, y, 2, height, strength);
  if (now >= lane.end && lane.cutShort) {
    // An end that is not the answer's own: a cross at the line.
    const x = scale(lane.end);
    context.strokeStyle = palette.text;
    context.lineWidth = 1.5;
    context.beginPath();
    for (const side of [-4, 4]) {
      context.moveTo(x - 4, place.mid + side);
      context.lineTo(x + 4, place.mid - side);
    }
    context.stroke();
  }
}

function drawChunks(context, lane, scale, { mid, top, tall }, now, strength) {
  const until = Math.min(now, lane.first);
  box(context, palette.prefill, scale(lane.begun), mid - 0.75, scale(until) - scale(lane.begun), 1.5, 0.7 * strength);
  if (lane.cached > 0 && !lane.transfer) {
    const width = Math.min(28, 4 + lane.cached / 26);
    hatched(context, scale(lane.begun) - width, top, width - 1, tall);
  }
  for (const chunk of lane.chunks) {
    if (chunk.start > now) break;
    if (scale(chunk.end) < scale.left - 2) continue;
    const x = scale(chunk.start);
    const width = scale(Math.min(now, chunk.end)) - x;
    const own = Math.min(width, scale(chunk.start + chunk.own) - x);
    box(context, palette.prefill, x, top, Math.max(1, width - 0.7), tall, 0.26 * strength);
    box(context, palette.prefill, x, top, Math.max(1, own - 0.7), tall, strength);
  }
}

function drawTicks(context, lane, scale, { mid, top, tall }, now, strength) {
  let drawnTo = -Infinity;
  for (const tick of lane.ticks) {
    if (tick.start > now || scale(tick.start) > scale.right) break;
    const end = scale(Math.min(now, tick.end));
    if (end < scale.left - 2) continue;
    const start = scale(tick.start);
    const stalled = tick.stall > 0 ? ((end - start) * tick.stall) / (tick.end - tick.start) : 0;
    box(context, palette.decode, start, mid - 0.75, end - start, 1.5, 0.75 * strength);
    if (stalled > 0.6) box(context, palette.prefill, end - stalled, mid - 2.5, stalled, 5, 0.55 * strength);
    // Ticks closer than a third of a pixel would only cost time.
    if (tick.end > now || end - drawnTo < 0.34) continue;
    drawnTo = end;
    box(context, palette.decode, end - 0.7, top, 1.4, tall, strength);
    if (tick.tokens > 1) dots(context, Math.min(tick.tokens - 1, 3), end, top - 2.5);
    if (tick.drafted > tick.tokens - 1) box(context, palette.neutral, end - 1, top + tall + 1.5, 2, 2);
  }
}

function drawTransfer(context, lane, scale, { mid }, now) {
  if (!lane.transfer || lane.transfer.start > now) return;
  const start = scale(lane.transfer.start);
  const width = scale(Math.min(now, lane.transfer.end ?? now)) - start;
  box(context, palette.moved, start, mid - 4, width, 8, 0.35);
  box(context, palette.moved, start, mid - 1, width, 2);
}

/**
 * A prompt as a bar of its tokens: cached, computed chunk by chunk, the rest. A notch below shows
 * where steps of others' prompts ran in between.
 */
export function drawPrompt(context, width, height, lane, steps, now) {
  const x = (tokens) => (tokens / Math.max(1, lane.prompt)) * width;
  const bar = height - 8;
  box(context, palette.grid, 0, 0, width, bar, 0.75);
  const chunks = lane.chunks.filter((chunk) => chunk.start <= now);
  if (lane.cached > 0 && now >= lane.begun) hatched(context, 0, 0, x(lane.cached) - 1, bar);
  let before = null;
  for (const chunk of chunks) {
    const part = Math.min(1, (now - chunk.start) / (chunk.end - chunk.start));
    const gap = x(chunk.tokens) > 4 ? 1 : 0.4;
    box(context, palette.prefill, x(chunk.from), 0, Math.max(1, x(chunk.tokens) * part - gap), bar, part < 1 ? 0.7 : 1);
    if (before !== null && othersBetween(steps, before.end, chunk.start)) notch(context, x(chunk.from), bar, height);
    before = chunk;
  }
  const guess = runningChunk(lane, chunks, now);
  if (guess > 0) box(context, palette.prefill, x(lane.readAt(now)), 0, x(guess), bar, ESTIMATE);
}

const othersBetween = (steps, from, to) => steps.some((step) => step.start >= from && step.end <= to && step.prefill.length);

function notch(context, x, top, bottom) {
  context.fillStyle = palette.prefill2;
  context.beginPath();
  context.moveTo(x, top);
  context.lineTo(x - 5, bottom);
  context.lineTo(x + 5, bottom);
  context.fill();
}

/** Tokens of the chunk that runs now, if it goes on as the last one did: an estimate. */
function runningChunk(lane, chunks, now) {
  const last = chunks.at(-1);
  if (last === undefined || last.end > now || lane.first <= now || lane.end <= now) return 0;
  const rate = last.tokens / (last.end - last.start);
  return Math.max(0, Math.min(last.tokens, lane.prompt - lane.readAt(now), (now - last.end) * rate));
}

/** An answer as its gaps: width and height are the time, and the blue part is another prompt's. */
export function drawGaps(context, width, height, lane, target, now) {
  const known = lane.ticks.filter((tick) => tick.end <= now);
  const worst = Math.max(5, ...known.map((tick) => tick.end - tick.start));
  const showsTarget = target > 0 && target < 2.5 * worst;
  const most = showsTarget ? Math.max(target * 1.2, worst) : worst;
  const until = now >= lane.end ? lane.end : Math.max(now, lane.first + 20 * worst);
  const scale = scaleOf(lane.first, until, 0, width);
  const base = height - 1;
  const tall = (value) => (value / most) * (height - 14);
  if (showsTarget) dashed(context, palette.neutral, [3, 4], 0, base - tall(target), width, base - tall(target));
  for (const tick of lane.ticks) {
    if (tick.start > now) break;
    const x = scale(tick.start);
    const wide = Math.max(1, scale(Math.min(now, tick.end)) - x - 1);
    const time = Math.min(now, tick.end) - tick.start;
    const stalled = Math.min(time, tick.stall);
    box(context, palette.decode, x, base - tall(time - stalled), wide, tall(time - stalled), tick.end > now ? 0.6 : 1);
    if (stalled > 0) box(context, palette.prefill, x, base - tall(time), wide, tall(stalled));
    if (tick.tokens > 1 && tick.end <= now) dots(context, Math.min(tick.tokens - 1, 2), x + wide / 2, base - tall(time) - 4);
  }
  // The gap that is open now: how long it will be, only its end tells.
  const last = known.at(-1)?.end ?? lane.first;
  if (now < lane.end && last < now) box(context, palette.decode, scale(last), base - tall(Math.min(most, now - last)), Math.max(1, scale(now) - scale(last)), tall(Math.min(most, now - last)), ESTIMATE);
  box(context, palette.grid, 0, base, width, 1);
  if (showsTarget && now >= lane.first) label(context, `target ${ms(target)}`, width, base - tall(target) - 4, { align: "right", size: 11 });
}

/**
 * Steps: upwards their time, decode's part and prefill's; downwards their tokens.
 *
 * @returns {number | null} where the line of the target was drawn
 */
export function drawSteps(context, steps, scale, { y, up, down }, { target, now, picked }) {
  const seen = steps.filter((step) => step.start <= now && scale(step.end) > scale.left - 5 && scale(step.start) < scale.right);
  // The longest 1.5 % may stick out: one pause of the machine must not flatten all other steps.
  const times = seen.map((step) => step.ms).sort((a, b) => a - b);
  const worst = Math.max(5, times[Math.ceil(times.length * 0.985) - 1] ?? 0);
  const showsTarget = target > 0 && target < 2.5 * worst;
  const most = showsTarget ? Math.max(target * 1.25, worst) : worst;
  const tall = (value) => Math.min(up, (value / most) * up);
  const deep = (tokens) => Math.min(down, Math.sqrt(tokens / 130) * down);
  for (const step of seen) {
    const x = scale(step.start);
    const end = Math.max(x + 1, scale(Math.min(now, step.end)) - 0.6);
    const whole = tall(Math.min(now, step.end) - step.start);
    const blue = whole * step.share;
    if (picked === step) box(context, palette.text, x - 1, y - up - 4, end - x + 2, up + down + 8, 0.13);
    box(context, palette.decode, x, y - whole + blue, end - x, whole - blue);
    box(context, palette.prefill, x, y - whole, end - x, blue);
    if (end - x > 2.5 && step.predicted > 0) box(context, palette.text, x, y - tall(step.predicted) - 0.5, end - x, 1, 0.55);
    const rows = step.rows;
    const orange = deep(rows);
    box(context, palette.decode, x, y + 3, end - x, orange, 0.8);
    box(context, palette.prefill, x, y + 3 + orange, end - x, Math.min(down - orange, deep(rows + step.tokens) - orange), 0.8);
  }
  if (!showsTarget) return null;
  dashed(context, palette.text, [4, 4], scale.left, y - tall(target), scale.right, y - tall(target));
  return y - tall(target);
}

/** The line of the last seconds: each step as its decode part and its prefill part. */
export function drawPulse(context, width, height, steps, now, span) {
  box(context, palette.grid, 0, 0, width, height);
  const scale = scaleOf(now - span, now, 0, width);
  for (const step of steps) {
    if (step.end < now - span || step.start > now) continue;
    const start = scale(step.start);
    const end = scale(step.end);
    const turn = start + (end - start) * (1 - step.share);
    box(context, palette.decode, start, 0, turn - start, height);
    box(context, palette.prefill, turn, 0, end - turn, height);
  }
}

/**
 * KV blocks as squares: the colour of what their request is doing, a dot where several share one.
 *
 * @param state for each block `null` (free), `"cached"`, or the lanes that hold it
 */
export function drawBlocks(context, width, height, state, now) {
  const side = Math.sqrt((width * height) / Math.max(1, state.length));
  const columns = Math.max(1, Math.ceil(width / Math.max(1.5, Math.floor(side * 2) / 2)));
  const size = Math.min(width / columns, height / Math.ceil(state.length / columns));
  const gap = size > 5 ? 1.5 : size > 3 ? 0.5 : 0;
  state.forEach((holders, i) => {
    const x = (i % columns) * size;
    const y = Math.floor(i / columns) * size;
    const inner = size - gap;
    if (holders === null) {
      if (size > 5) {
        context.strokeStyle = palette.grid;
        context.lineWidth = 1;
        context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
      } else box(context, palette.grid, x, y, inner, inner, 0.5);
      return;
    }
    if (holders === "cached") {
      box(context, palette.neutral, x, y, inner, inner, 0.38);
      return;
    }
    const decodes = holders.some((lane) => lane.first <= now);
    box(context, decodes ? palette.decode : palette.prefill, x, y, inner, inner);
    if (holders.length > 1 && size > 5) {
      context.fillStyle = palette.surface;
      context.beginPath();
      context.arc(x + inner / 2, y + inner / 2, inner / 4, 0, 7);
      context.fill();
    }
  });
}

/**
 * The roofline, and each phase's last steps under it: FLOP per byte to the right, GFLOP/s upwards.
 *
 * @param roof `{gflops, gbytes}`, the machine's measured ceilings; null if unknown
 * @param trails by phase, points `{x: FLOP per byte, y: GFLOP/s}`, oldest first
 */
export function drawRoof(context, width, height, roof, trails) {
  const left = 38;
  const bottom = height - 18;
  const points = [...trails.prefill, ...trails.decode];
  const peak = roof?.gflops ?? Math.max(100, ...points.map((point) => point.y));
  const decades = { x: [-0.5, 3.5], y: [Math.floor(Math.log10(peak)) - 2.5, Math.log10(peak) + 0.25] };
  const position = (value, [low, high]) => (Math.log10(value) - low) / (high - low);
  const x = (value) => left + Math.min(1, Math.max(0, position(value, decades.x))) * (width - left - 6);
  const y = (value) => bottom - Math.min(1, Math.max(0, position(value, decades.y))) * (bottom - 8);
  for (let power = Math.ceil(decades.y[0]); power <= decades.y[1]; power += 1) {
    box(context, palette.grid, left, y(10 ** power), width - left, 1);
    label(context, String(10 ** power), left - 6, y(10 ** power) + 4, { align: "right", size: 11 });
  }
  for (const value of [1, 10, 100, 1000]) label(context, String(value), x(value), height - 3, { align: "center", size: 11 });
  if (roof) {
    const { gflops, gbytes } = roof;
    const foot = Math.max(10 ** decades.x[0], 10 ** decades.y[0] / gbytes);
    context.strokeStyle = palette.muted;
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x(foot), y(foot * gbytes));
    context.lineTo(x(gflops / gbytes), y(gflops));
    context.lineTo(width, y(gflops));
    context.stroke();
    label(context, `${Math.round(gflops).toLocaleString("en")} GFLOP/s`, width - 2, y(gflops) - 5, { align: "right", size: 11 });
    label(context, `${gbytes.toFixed(1)} GB/s`, x(1.6), y(1.2 * gbytes), { align: "right", size: 11 });
  }
  for (const [phase, trail] of Object.entries(trails)) {
    trail.forEach((point, i) => {
      const last = i === trail.length - 1;
      context.globalAlpha = last ? 1 : 0.05 + (0.25 * i) / trail.length;
      context.fillStyle = palette[phase];
      context.beginPath();
      context.arc(x(point.x), y(point.y), last ? 6 : 3, 0, 7);
      context.fill();
    });
  }
  context.globalAlpha = 1;
}

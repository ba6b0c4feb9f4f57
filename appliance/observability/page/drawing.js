// The drawing: tiers to scale, what they hold by urgency, and what flows between them and the runtimes.
//
// Bars have one origin, so that lengths compare; cards beside them have one size, so that arrows have
// somewhere to end when a tier is a thousandth of the next.

import { ANSWERS, WINDOW, answered, foundOf, hue, mean } from "./lately.js";
import { html, put, show, svg, swatch, text } from "./nodes.js";
import { bytes, count, percent } from "./numbers.js";
import { STACKED_BELOW, stacked } from "./stacked.js";
import { CLASSES, arrow, cut, named, ruler, taken, tierBar, tierShare, tierWords } from "./tiers.js";

const LATELY = 20; // samples the widest arrow is chosen from
const calm = matchMedia("(prefers-reduced-motion: reduce)");

// In units of the drawing, which is 1200 wide.
const AT = {
  runtime: 0,
  runtimeWidth: 168,
  card: 372,
  cardWidth: 214,
  bar: 606,
  barWidth: 584,
  row: 82,
  gap: 76,
  bottom: 34, // for what stands under the marks
};
const MIN_HEIGHT = 172; // of the runtimes' words
const MIN_STACK = 40;

/** Return [height of the drawing without its marks, top of a row]: few tiers stand in the middle. */
function layout(numTiers) {
  const needed = 4 + numTiers * (AT.row + AT.gap) - AT.gap;
  const height = Math.max(needed, MIN_HEIGHT);
  return [height, (row) => 4 + (height - needed) / 2 + row * (AT.row + AT.gap)];
}

function drawnTier(tier, top, length, within) {
  return svg(
    "g",
    { transform: `translate(0 ${top})`, class: tier.is_offline ? "tier offline" : "tier" },
    svg("rect", { x: AT.card, width: AT.cardWidth, height: AT.row, rx: 9, class: "plate" }),
    text(AT.card + 14, 27, tier.tier, "name"),
    text(AT.card + AT.cardWidth - 14, 27, tierShare(tier), "share end"),
    text(AT.card + 14, 49, `${bytes(taken(tier))} of ${bytes(tier.capacity_bytes)}`),
    text(AT.card + 14, 68, cut(tier.backend, AT.cardWidth - 28), "quiet"),
    svg(
      "g",
      { transform: `translate(${AT.bar} 6)` },
      tierBar(tier, length, 44),
      text(0, 64, tierWords(tier, within, AT.barWidth), "quiet"),
    ),
  );
}

function drawnEdge(edge, rows, rowTop, history, peak) {
  const rate = mean(history.edge_bytes_per_s[`${edge.source}>${edge.target}`]);
  const [source, target] = [rows.indexOf(edge.source), rows.indexOf(edge.target)];
  const title = svg(
    "title",
    {},
    `${edge.source} → ${edge.target}: ${bytes(rate)}/s, ${edge.num_in_flight} in flight, ${edge.num_queued} queued`,
  );
  const label = (x, y, word) => [
    text(x, y, word, "quiet"),
    text(x, y + 16, rate > 0 ? `${bytes(rate)}/s` : "–", "rate"),
  ];
  if (target < 0 || source === target) return null;
  if (Math.abs(source - target) > 1 && source >= 0 && !edge.num_copies) return null;
  if (source < 0) {
    // a client's staging memory
    const y = rowTop(target) + 22;
    return svg(
      "g",
      {},
      title,
      arrow("put", [AT.runtimeWidth, y], [AT.card, y], rate, peak),
      text(180, y - 15, `put  ${rate > 0 ? `${bytes(rate)}/s` : "–"}`, "rate"),
    );
  }
  const isUp = target < source;
  const kind = isUp ? "promote" : "demote";
  if (Math.abs(source - target) > 1) {
    // past a tier
    const y = (row) => rowTop(row) + (isUp ? AT.row - 8 : AT.row - 20);
    return svg(
      "g",
      {},
      title,
      arrow(kind, [AT.card, y(source)], [AT.card, y(target)], rate, peak, isUp ? 74 : 46),
    );
  }
  const x = AT.card + (isUp ? 24 : 124);
  const [top, bottom] = [rowTop(Math.min(source, target)) + AT.row + 3, rowTop(Math.max(source, target)) - 3];
  return svg(
    "g",
    {},
    title,
    arrow(kind, [x, isUp ? bottom : top], [x, isUp ? top : bottom], rate, peak),
    label(x + 18, top + 31, kind),
  );
}

function drawnReads(tier, top, rate, peak) {
  const y = top + 60;
  return svg(
    "g",
    {},
    svg("title", {}, `found in ${tier}: ${bytes(rate)}/s`),
    arrow("read", [AT.card, y], [AT.runtimeWidth, y], rate, peak),
    text(180, y + 25, `found  ${rate > 0 ? `${bytes(rate)}/s` : "–"}`, "rate"),
  );
}

function drawnRuntimes(counts, history, height) {
  const { by, asked } = answered(history, history.asked.length);
  let y = 104;
  const tall = height - y - 84;
  const isDrawn = (word) => by[word] > 0 && tall >= MIN_STACK;
  const stack = ANSWERS.filter(isDrawn).map((word) => {
    const part = (tall * by[word]) / asked;
    const middle = y + part / 2;
    y += part;
    return [
      svg("rect", { x: 16, y: (y - part).toFixed(1), width: 30, height: part.toFixed(1), class: hue(word) }),
      part > 17 ? text(56, middle + 4, `${word} ${percent(by[word] / asked)}`, "quiet") : null,
    ];
  });
  return svg(
    "g",
    {},
    svg("rect", { x: AT.runtime, y: 4, width: AT.runtimeWidth, height: height - 4, rx: 9, class: "plate" }),
    text(16, 31, "runtimes", "name"),
    text(16, 53, `${count(counts.clients)} connected`),
    text(16, 84, askedWords(history), "quiet"),
    stack.flat(),
    text(16, height - 54, named(counts.leases, "lease"), "quiet"),
    text(16, height - 36, named(counts.pins, "pin"), "quiet"),
    text(16, height - 18, `${count(counts.waiting)} waiting`, "quiet"),
  );
}

/** Blocks that runtimes ask for, per second. */
function askedWords(history) {
  const { asked } = answered(history, history.asked.length);
  return asked ? `${count(asked / Math.min(WINDOW, history.asked.length))} blocks/s asked` : "nothing asked";
}

/** What the drawing shows beside the tiers: bytes per second by reader and edge, and the most there was. */
function traffic(snapshot, history) {
  const { tiers, totals } = snapshot;
  const perBlock = foundOf(totals) ? totals.read_bytes / foundOf(totals) : 0;
  const reads = Object.fromEntries(
    tiers.map(({ tier }) => [tier, (mean(history.found[tier]) / history.interval_s) * perBlock]),
  );
  const columns = Object.values(history.edge_bytes_per_s);
  const peak = Math.max(1, ...Object.values(reads), ...columns.flatMap((column) => column.slice(-LATELY)));
  return { reads, peak, rate: (source, target) => mean(history.edge_bytes_per_s[`${source}>${target}`]) };
}

function wide(snapshot, history, isLinear, { reads, peak, rate }) {
  const { tiers, edges, counts } = snapshot;
  const rows = tiers.map((tier) => tier.tier);
  const [height, rowTop] = layout(tiers.length);
  const [length, marks] = ruler(
    tiers.map((tier) => tier.capacity_bytes),
    isLinear,
    AT.barWidth,
  );
  const mark = (n) =>
    svg(
      "g",
      { class: "mark" },
      svg("line", { x1: AT.bar + length(n), x2: AT.bar + length(n), y1: 0, y2: height + 8 }),
      text(
        AT.bar + length(n),
        height + 26,
        n ? bytes(n).replace(".0", "") : "0",
        n && length(n) > AT.barWidth - 30 ? "quiet end" : "quiet middle",
      ),
    );
  const nodes = [
    svg("g", {}, marks.map(mark)),
    drawnRuntimes(counts, history, height),
    svg(
      "g",
      {},
      tiers.map(({ tier }, row) => drawnReads(tier, rowTop(row), reads[tier], peak)),
    ),
    svg(
      "g",
      {},
      edges.map((edge) => drawnEdge(edge, rows, rowTop, history, peak)),
    ),
    svg(
      "g",
      {},
      tiers.map((tier, row) =>
        drawnTier(tier, rowTop(row), length(tier.capacity_bytes), rate(tier.tier, tier.tier)),
      ),
    ),
  ];
  return [1200, height + AT.bottom, nodes];
}

export function drawTiers(snapshot, history, isLinear) {
  const { tiers } = snapshot;
  const flows = traffic(snapshot, history);
  const drawing = document.getElementById("drawing");
  const room = drawing.parentElement.clientWidth;
  const [width, height, nodes] =
    room < STACKED_BELOW // what runtimes do is in words there
      ? stacked(snapshot, askedWords(history), isLinear, flows, room)
      : wide(snapshot, history, isLinear, flows);
  drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  show(
    drawing,
    svg(
      "defs",
      {},
      svg(
        "pattern",
        {
          id: "arriving",
          width: 6,
          height: 6,
          patternUnits: "userSpaceOnUse",
          patternTransform: "rotate(45)",
        },
        svg("rect", { width: 3, height: 6, class: "stripe" }),
      ),
    ),
    nodes,
  );
  put(
    "drawing-words",
    tiers
      .map((tier) => `${tier.tier}: ${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)} used.`)
      .join(" "),
  );
  const { peak } = flows;
  const isStacked = room < STACKED_BELOW;
  const hasArrows = peak > 1 && (!isStacked || tiers.length > 1);
  const moves = tiers.length > 1 ? [swatch("line promote", "promote"), swatch("line demote", "demote")] : [];
  put(
    "legend",
    ...CLASSES.map((word) => swatch(word, word === "none" ? "no session" : word)),
    swatch("reserved", "arriving"),
    swatch("condemned", "condemned"),
    swatch("track", "free"),
    ...(isStacked ? [] : [swatch("line put", "put")]),
    ...moves,
    ...(isStacked ? [] : [swatch("line read", "found, and read by a runtime")]),
    html(
      "li",
      { class: "quiet" },
      `fill: share of the tier${hasArrows ? ` · arrows: mean of 3 s, the widest would be ${bytes(peak)}/s, the most in ${LATELY} s` : ""}`,
    ),
  );
  flow(drawing);
}

/** Let the dashes of busy edges run; they keep their pace between two snapshots. */
export function flow(drawing) {
  for (const path of drawing.querySelectorAll(".flow")) {
    const rate = calm.matches || document.body.dataset.link !== "live" ? 0 : Number(path.dataset.rate);
    const [running] = path.getAnimations();
    if (rate > 0)
      (
        running ??
        path.animate([{ strokeDashoffset: 20 }, { strokeDashoffset: 0 }], {
          duration: 1000,
          iterations: Infinity,
        })
      ).updatePlaybackRate(rate);
    else running?.cancel();
  }
}

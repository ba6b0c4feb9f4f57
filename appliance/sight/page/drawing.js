// The drawing: tiers to scale, what they hold by urgency, and what flows between them and the runtimes.
//
// Bars have one origin, so that lengths compare; cards beside them have one size, so that arrows have
// somewhere to end when a tier is a thousandth of the next.

import { ANSWERS, WINDOW, answered, foundOf, mean } from "./lately.js";
import { bar, html, put, show, svg, swatch, text } from "./nodes.js";
import { bytes, count, percent, sum } from "./numbers.js";

export const URGENCIES = ["decoding", "prefill", "queued", "waiting", "idle", "ended"];
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
};
const rowTop = (row) => 4 + row * (AT.row + AT.gap);

/** Return [length of a capacity in the drawing, capacities to mark]. */
function ruler(capacities, isLinear) {
  const [low, high] = [Math.min(...capacities), Math.max(...capacities)];
  if (isLinear) {
    const step = 2 ** Math.floor(Math.log2(high / 3));
    return [
      (n) => (AT.barWidth * n) / high,
      Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step),
    ];
  }
  const from = Math.floor(Math.log2(low)) - 2;
  const span = Math.log2(high) - from;
  const step = Math.ceil(span / 7);
  const marks = Array.from({ length: Math.floor(span / step) + 1 }, (_, i) => 2 ** (from + i * step));
  return [(n) => (AT.barWidth * Math.max(0, Math.log2(n) - from)) / span, marks];
}

function drawnTier(tier, row, length, ownRate) {
  const taken = tier.used_bytes + tier.reserved_bytes + tier.condemned_bytes;
  const share = tier.capacity_bytes ? taken / tier.capacity_bytes : 0;
  const urgencies = URGENCIES.map((word) => [word, tier.bytes_by_urgency[word]]);
  const parts = urgencies.map(([word, n]) => [word, n, `${word}: ${bytes(n)}`]);
  parts.push(["reserved", tier.reserved_bytes, `arriving: ${bytes(tier.reserved_bytes)}`]);
  parts.push(["condemned", tier.condemned_bytes, `condemned: ${bytes(tier.condemned_bytes)}`]);
  const words = urgencies
    .filter(([, n]) => n > 0)
    .sort((a, b) => b[1] - a[1])
    .slice(0, 3)
    .map(([word, n]) => `${word} ${bytes(n)}`);
  words.unshift(`${count(tier.num_fragments)} fragments`);
  if (tier.pinned_bytes) words.push(`pinned ${bytes(tier.pinned_bytes)}`);
  return svg(
    "g",
    { transform: `translate(0 ${rowTop(row)})`, class: tier.is_offline ? "tier offline" : "tier" },
    svg("rect", { x: AT.card, width: AT.cardWidth, height: AT.row, rx: 9, class: "plate" }),
    text(AT.card + 14, 27, tier.tier, "name"),
    text(AT.card + AT.cardWidth - 14, 27, tier.is_offline ? "offline" : percent(share), "share end"),
    text(AT.card + 14, 49, `${bytes(taken)} of ${bytes(tier.capacity_bytes)}`),
    text(
      AT.card + 14,
      68,
      ownRate > 0 ? `${tier.backend} · ${bytes(ownRate)}/s within` : tier.backend,
      "quiet",
    ),
    svg(
      "g",
      { transform: `translate(${AT.bar} 6)` },
      svg("rect", { width: length.toFixed(1), height: 44, rx: 5, class: "track" }),
      bar(parts, Math.max(tier.capacity_bytes, sum(parts.map(([, n]) => n))), length, 44),
      svg("rect", { width: length.toFixed(1), height: 44, rx: 5, class: "outline" }),
      text(0, 64, words.join("  ·  "), "quiet"),
    ),
  );
}

/** An arrow from [x, y] to [x, y], as wide as its traffic; `bend` pushes its middle to the left. */
function arrow(kind, from, to, rate, peak, bend = 0) {
  const width = rate > 0 ? Math.max(2, (22 * rate) / peak) : 1;
  const head = rate > 0 ? Math.max(7, width * 0.9) : 5;
  const length = Math.hypot(to[0] - from[0], to[1] - from[1]);
  const [dx, dy] = bend ? [1, 0] : [(to[0] - from[0]) / length, (to[1] - from[1]) / length];
  const tip = [to[0] - dx * head, to[1] - dy * head];
  const path = bend
    ? `M${from} C${from[0] - bend},${from[1]} ${to[0] - bend},${to[1]} ${tip}`
    : `M${from} L${tip}`;
  const side = (sign) => `${tip[0] - sign * dy * head * 0.8},${tip[1] + sign * dx * head * 0.8}`;
  return svg(
    "g",
    { class: `edge ${kind} ${rate > 0 ? "busy" : "still"}` },
    svg("path", { d: path, class: "body", "stroke-width": width.toFixed(1) }),
    svg("path", {
      d: path,
      class: "flow",
      "stroke-width": Math.max(1.5, width * 0.4).toFixed(1),
      "data-rate": rate > 0 ? (0.4 + 1.6 * Math.sqrt(rate / peak)).toFixed(2) : 0,
    }),
    svg("polygon", { points: `${to} ${side(1)} ${side(-1)}`, class: "head" }),
  );
}

function drawnEdge(edge, rows, history, peak) {
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

function drawnReads(tier, row, rate, peak) {
  const y = rowTop(row) + 60;
  return svg(
    "g",
    {},
    svg("title", {}, `found in ${tier}: ${bytes(rate)}/s`),
    arrow(`read ${tier}`, [AT.card, y], [AT.runtimeWidth, y], rate, peak),
    text(180, y + 25, `found  ${rate > 0 ? `${bytes(rate)}/s` : "–"}`, "rate"),
  );
}

function drawnRuntimes(counts, history, height) {
  const { by, asked } = answered(history, history.asked.length);
  let y = 104;
  const tall = height - y - 84;
  const stack = ANSWERS.filter((word) => by[word] > 0).map((word) => {
    const part = (tall * by[word]) / asked;
    const middle = y + part / 2;
    y += part;
    return [
      svg("rect", { x: 16, y: (y - part).toFixed(1), width: 30, height: part.toFixed(1), class: word }),
      part > 13 ? text(56, middle + 4, `${word} ${percent(by[word] / asked)}`, "quiet") : null,
    ];
  });
  return svg(
    "g",
    {},
    svg("rect", { x: AT.runtime, y: 4, width: AT.runtimeWidth, height: height - 4, rx: 9, class: "plate" }),
    text(16, 31, "runtimes", "name"),
    text(16, 53, `${count(counts.clients)} connected`),
    text(
      16,
      84,
      asked ? `${count(asked / Math.min(WINDOW, history.asked.length))} blocks/s asked` : "nothing asked",
      "quiet",
    ),
    stack.flat(),
    text(16, height - 54, `${count(counts.leases)} leases`, "quiet"),
    text(16, height - 36, `${count(counts.pins)} pins`, "quiet"),
    text(16, height - 18, `${count(counts.waiting)} waiting`, "quiet"),
  );
}

export function drawTiers(snapshot, history, isLinear) {
  const { tiers, edges, totals, counts } = snapshot;
  const rows = tiers.map((tier) => tier.tier);
  const height = rowTop(tiers.length - 1) + AT.row;
  const [length, marks] = ruler(
    tiers.map((tier) => tier.capacity_bytes),
    isLinear,
  );
  const perBlock = foundOf(totals) ? totals.read_bytes / foundOf(totals) : 0;
  const reads = Object.fromEntries(
    rows.map((tier) => [tier, (mean(history.found[tier]) / history.interval_s) * perBlock]),
  );
  const peak = Math.max(
    1,
    ...Object.values(reads),
    ...Object.values(history.edge_bytes_per_s).flatMap((column) => column.slice(-LATELY)),
  );
  const drawing = document.getElementById("drawing");
  drawing.setAttribute("viewBox", `0 0 1200 ${height + 34}`);
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
    svg("g", {}, marks.map(mark)),
    drawnRuntimes(counts, history, height),
    svg(
      "g",
      {},
      tiers.map((tier, row) => drawnReads(tier.tier, row, reads[tier.tier], peak)),
    ),
    svg(
      "g",
      {},
      edges.map((edge) => drawnEdge(edge, rows, history, peak)),
    ),
    svg(
      "g",
      {},
      tiers.map((tier, row) =>
        drawnTier(
          tier,
          row,
          length(tier.capacity_bytes),
          mean(history.edge_bytes_per_s[`${tier.tier}>${tier.tier}`]),
        ),
      ),
    ),
  );
  put(
    "drawing-words",
    tiers
      .map((tier) => `${tier.tier}: ${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)} used.`)
      .join(" "),
  );
  put(
    "legend",
    ...URGENCIES.map((word) => swatch(word, word)),
    swatch("reserved", "arriving"),
    swatch("condemned", "condemned"),
    swatch("track", "free"),
    swatch("line put", "put"),
    swatch("line promote", "promote"),
    swatch("line demote", "demote"),
    swatch("line read", "found, and read by a runtime"),
    html(
      "li",
      { class: "quiet" },
      `fill: share of the tier${peak > 1 ? ` · arrows: mean of 3 s, the widest would be ${bytes(peak)}/s, the most in ${LATELY} s` : ""}`,
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

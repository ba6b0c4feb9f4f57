// Tiers: what both drawings are made of: a tier's bar, its words, the ruler, an arrow.

import { bar, svg } from "./nodes.js";
import { bytes, count, percent, sum } from "./numbers.js";

export const URGENCIES = ["decoding", "prefill", "queued", "waiting", "idle", "ended"];
export const CLASSES = [...URGENCIES, "none"]; // of a tier's bytes; none: no session used them since the start
const NAMED_CLASSES = 3; // in words under a bar
const LETTER = 6.7; // the width of one in words of 12.5 px, roughly

export const taken = (tier) => tier.used_bytes + tier.reserved_bytes + tier.condemned_bytes;
export const named = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

/** Return words, cut to what fits a width. */
export const cut = (words, width) =>
  words.length * LETTER <= width ? words : `${words.slice(0, Math.floor(width / LETTER) - 1)}…`;

export const tierShare = (tier) =>
  tier.is_offline ? "offline" : percent(tier.capacity_bytes ? taken(tier) / tier.capacity_bytes : 0);

/** Return the bar of a tier: its bytes by class, then what arrives and what is condemned. */
export function tierBar(tier, length, height) {
  const parts = CLASSES.map((word) => {
    const n = tier.bytes_by_urgency[word];
    return [word, n, `${word === "none" ? "no session" : word}: ${bytes(n)}`];
  });
  parts.push(["reserved", tier.reserved_bytes, `arriving: ${bytes(tier.reserved_bytes)}`]);
  parts.push(["condemned", tier.condemned_bytes, `condemned: ${bytes(tier.condemned_bytes)}`]);
  return [
    svg("rect", { width: length.toFixed(1), height, rx: 5, class: "track" }),
    svg("clipPath", { id: `bar-${tier.tier}` }, svg("rect", { width: length.toFixed(1), height, rx: 5 })),
    svg(
      "g",
      { "clip-path": `url(#bar-${tier.tier})` },
      bar(parts, Math.max(tier.capacity_bytes, sum(parts.map(([, n]) => n))), length, height),
    ),
    svg("rect", { width: length.toFixed(1), height, rx: 5, class: "outline" }),
  ];
}

/** Return what a tier holds, the most first, in as many words as fit a width. `within`: bytes a second. */
export function tierWords(tier, within, width) {
  const words = CLASSES.map((word) => [word, tier.bytes_by_urgency[word]])
    .filter(([, n]) => n > 0)
    .sort((a, b) => b[1] - a[1])
    .slice(0, NAMED_CLASSES)
    .map(([word, n]) => `${word === "none" ? "no session" : word} ${bytes(n)}`);
  words.unshift(named(tier.num_fragments, "fragment"));
  if (tier.pinned_bytes) words.push(`pinned ${bytes(tier.pinned_bytes)}`);
  if (within > 0) words.push(`${bytes(within)}/s within`);
  let line = words[0];
  for (const word of words.slice(1)) {
    if ((line.length + word.length + 5) * LETTER > width) break;
    line += `  ·  ${word}`;
  }
  return line;
}

/** Return [length of a capacity in the drawing, capacities to mark]. */
export function ruler(capacities, isLinear, width) {
  const [low, high] = [Math.min(...capacities), Math.max(...capacities)];
  if (isLinear) {
    const step = 2 ** Math.ceil(Math.log2(high / Math.min(6, Math.floor(width / 80))));
    return [
      (n) => (width * n) / high,
      Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step),
    ];
  }
  const from = Math.floor(Math.log2(low)) - 2;
  const span = Math.log2(high) - from;
  const step = Math.ceil(span / Math.min(7, Math.floor(width / 80)));
  const marks = Array.from({ length: Math.floor(span / step) + 1 }, (_, i) => 2 ** (from + i * step));
  return [(n) => (width * Math.max(0, Math.log2(n) - from)) / span, marks];
}

/** An arrow from [x, y] to [x, y], as wide as its traffic; `bend` pushes its middle to the left. */
export function arrow(kind, from, to, rate, peak, bend = 0) {
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

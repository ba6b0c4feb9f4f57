// The drawing where there is little width: one tier under the other, what runtimes do in words. Its units are
// pixels, so that words stay as large as they are.

import { svg, text } from "./nodes.js";
import { bytes, count } from "./numbers.js";
import { arrow, cut, named, ruler, taken, tierBar, tierShare, tierWords } from "./tiers.js";

export const STACKED_BELOW = 1000; // pixels
const HEAD = 84;
const TIER = 112;
const BAR = 26;
const GAP = 58; // between tiers: the arrows
const BOTTOM = 26;

/** Return [width, height, nodes]. */
export function stacked(snapshot, asked, isLinear, { reads, peak, rate }, room) {
  const { tiers, counts } = snapshot;
  const width = Math.max(280, room);
  const [length, marks] = ruler(
    tiers.map((tier) => tier.capacity_bytes),
    isLinear,
    width,
  );
  const top = (row) => HEAD + row * (TIER + GAP);
  const bottom = top(tiers.length - 1) + TIER;
  const held = [named(counts.leases, "lease"), named(counts.pins, "pin"), `${count(counts.waiting)} waiting`];
  const drawn = (tier, row) =>
    svg(
      "g",
      { transform: `translate(0 ${top(row)})`, class: tier.is_offline ? "tier offline" : "tier" },
      text(0, 14, tier.tier, "name"),
      text(width, 14, tierShare(tier), "share end"),
      text(
        0,
        34,
        cut(`${bytes(taken(tier))} of ${bytes(tier.capacity_bytes)}  ·  ${tier.backend}`, width),
        "quiet",
      ),
      svg("g", { transform: "translate(0 44)" }, tierBar(tier, length(tier.capacity_bytes), BAR)),
      text(0, 86, tierWords(tier, rate(tier.tier, tier.tier), width), "quiet"),
      text(0, 106, traffic(tier.tier), "rate"),
    );
  const putTier = snapshot.edges.find((edge) => edge.source === "staging")?.target;
  const pace = (n) => (n > 0 ? `${bytes(n)}/s` : "–");
  const traffic = (tier) =>
    [tier === putTier ? `put ${pace(rate("staging", tier))}` : "", `found ${pace(reads[tier])}`]
      .filter(Boolean)
      .join("  ·  ");
  const between = (upper, row) => {
    const lower = tiers[row + 1].tier;
    const [from, to] = [top(row) + TIER + 5, top(row + 1) - 6];
    const [up, down] = [rate(lower, upper.tier), rate(upper.tier, lower)];
    const label = (x, word, n) => [
      text(x, from + 20, word, "quiet"),
      text(x, from + 36, pace(n), "rate"),
    ];
    return [
      arrow("promote", [12, to], [12, from], up, peak),
      label(32, "promote", up),
      arrow("demote", [width / 2 + 12, from], [width / 2 + 12, to], down, peak),
      label(width / 2 + 32, "demote", down),
    ].flat();
  };
  const mark = (n) =>
    svg(
      "g",
      { class: "mark" },
      svg("line", { x1: length(n), x2: length(n), y1: HEAD - 6, y2: bottom + 6 }),
      text(
        length(n),
        bottom + 22,
        n ? bytes(n).replace(".0", "") : "0",
        length(n) < 30 ? "quiet" : length(n) > width - 30 ? "quiet end" : "quiet middle",
      ),
    );
  return [
    width,
    bottom + BOTTOM,
    [
      svg("g", {}, marks.map(mark)),
      text(0, 16, "runtimes", "name"),
      text(width, 16, `${count(counts.clients)} connected`, "end"),
      text(0, 38, asked, "quiet"),
      text(0, 57, held.join("  ·  "), "quiet"),
      svg("g", {}, tiers.slice(0, -1).flatMap(between)),
      svg("g", {}, tiers.map(drawn)),
    ],
  ];
}

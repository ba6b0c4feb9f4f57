// Lately: the columns of the past five minutes, and what is read from them; and the tiers that they name.

import { sum } from "./numbers.js";

export const KEPT = 300; // samples, as many as the daemon keeps
export const WINDOW = 10; // samples a share is taken over
export let TIERS = []; // names, fastest first, as the daemon has them
export let ANSWERS = []; // what becomes of a block that was asked for
const hues = new CSSStyleSheet();

/** Take over the names of the daemon's tiers. Memories below dram have a colour between its and nvme's. */
export function know(tiers) {
  if (tiers.join() === TIERS.join()) return;
  TIERS = tiers;
  ANSWERS = [...TIERS, "declined", "missed"];
  const [first, last] = [tiers.indexOf("dram"), tiers.length - 1];
  const mixed = (i) => `color-mix(in srgb, var(--nvme) ${(100 * (i - first)) / (last - first)}%, var(--dram))`;
  hues.replaceSync(
    tiers
      .slice(first + 1, last)
      .map((name, k) => `.tier-${name} { --c: ${mixed(first + 1 + k)} }`)
      .join(" "),
  );
  document.adoptedStyleSheets = [hues];
}

/** The class that gives a word its colour: tiers have names that users choose. */
export const hue = (word) => (TIERS.includes(word) ? `tier-${word}` : word);

/** Add the columns of `more` to those of `past`; a column that is new was 0 before. */
export function joined(past, more, numPast) {
  if (Array.isArray(more)) return [...(past ?? Array(numPast).fill(0)), ...more].slice(-KEPT);
  if (more === null || typeof more !== "object") return more;
  return Object.fromEntries(Object.keys(more).map((key) => [key, joined(past?.[key], more[key], numPast)]));
}

/** Blocks by answer in the WINDOW samples up to `end`, and their sum. */
export function answered(history, end, window = WINDOW) {
  const last = (column) => sum(column.slice(Math.max(0, end - window), end));
  const by = { declined: last(history.declined), missed: last(history.missed) };
  for (const tier of TIERS) by[tier] = last(history.found[tier]);
  return { by, asked: sum(Object.values(by)) };
}

export const mean = (column, n = 3) =>
  column?.length ? sum(column.slice(-n)) / Math.min(n, column.length) : 0;
export const foundOf = (totals) => sum(Object.values(totals.found));

// The chart: where blocks were found in the last five minutes, as shares of what was asked for.

import { ANSWERS, KEPT, TIERS, WINDOW, answered, hue } from "./lately.js";
import { put, show, svg, swatch, text } from "./nodes.js";
import { count, percent, seconds } from "./numbers.js";

const PLOT = { left: 46, top: 8, right: 4, height: 190 };
const WIDEST = 1200; // units are pixels in a window narrower than that

/** Return the width of the drawing, and of the plot in it. */
function widths(drawing) {
  const all = Math.max(280, Math.min(WIDEST, drawing.parentElement.clientWidth));
  return [all, all - PLOT.left - PLOT.right];
}

export function drawHistory(history, looksAt) {
  const num = history.asked.length;
  const drawing = document.getElementById("history");
  const [all, width] = widths(drawing);
  const x = (i) => PLOT.left + width * (1 - (num - i) / KEPT);
  const y = (share) => PLOT.top + PLOT.height * (1 - share);
  const shares = Array.from({ length: num }, (_, i) => {
    const { by, asked } = answered(history, i + 1);
    let under = 0;
    return asked ? ANSWERS.map((word) => (under += by[word] / asked)) : null; // sums so far
  });
  const runs = [];
  shares.forEach((share, i) => {
    if (share) (shares[i - 1] ? runs.at(-1) : runs[runs.push([]) - 1]).push(i);
  });
  const band = (k) =>
    runs
      .map((run) => {
        const ends = [run[0], ...run.map((i) => i + 0.5), run.at(-1) + 1];
        const over = (level) =>
          ends.map(
            (at) =>
              `${x(at).toFixed(1)},${y(level < 0 ? 0 : shares[Math.min(Math.floor(at), run.at(-1))][level]).toFixed(1)}`,
          );
        return `M${over(k).join(" L")} L${over(k - 1)
          .reverse()
          .join(" L")} Z`;
      })
      .join(" ");
  const seen = looksAt === null ? null : Math.max(0, Math.min(num - 1, looksAt));
  drawing.setAttribute("viewBox", `0 0 ${all} 224`);
  show(
    drawing,
    svg(
      "g",
      {},
      ANSWERS.map((word, k) => svg("path", { d: band(k), class: hue(word) })),
    ),
    svg(
      "g",
      { class: "mark" },
      [0, 0.25, 0.5, 0.75, 1]
        .map((share) => [
          svg("line", { x1: PLOT.left, x2: PLOT.left + width, y1: y(share), y2: y(share) }),
          text(PLOT.left - 6, y(share) + 4, `${share * 100} %`, "quiet end"),
        ])
        .flat(),
      (width < 400 ? [4, 2, 0] : [5, 4, 3, 2, 1, 0]).map((minutes) =>
        text(
          PLOT.left + width * (1 - minutes / 5),
          218,
          minutes ? `−${minutes} min` : "now",
          minutes === 5 ? "quiet" : minutes ? "quiet middle" : "quiet end",
        ),
      ),
    ),
    seen === null || !num
      ? null
      : svg("line", {
          class: "hair",
          x1: x(seen + 0.5),
          x2: x(seen + 0.5),
          y1: PLOT.top,
          y2: PLOT.top + PLOT.height,
        }),
  );
  put("reading", num ? reading(history, seen ?? num - 1) : "nothing yet");
  const isThere = (word) => !TIERS.includes(word) || word in history.used_bytes;
  put(
    "answers",
    ...ANSWERS.filter(isThere).map((word) =>
      swatch(hue(word), TIERS.includes(word) ? `found in ${word}` : word),
    ),
  );
}

function reading(history, i) {
  const { by, asked } = answered(history, i + 1);
  const when =
    i === history.asked.length - 1
      ? `last ${WINDOW} s`
      : `${WINDOW} s until ${seconds(history.at_s.at(-1) - history.at_s[i])} ago`;
  return asked
    ? `${when}: ${percent(1 - (by.missed + by.declined) / asked)} of ${count(asked)} blocks found`
    : `${when}: nothing asked`;
}

/** Return which sample is under the pointer. */
export function sampleAt(event, drawing, num) {
  const box = drawing.getBoundingClientRect();
  const [all, width] = widths(drawing);
  const x = ((event.clientX - box.left) * all) / box.width;
  return Math.floor(num - KEPT * (1 - (x - PLOT.left) / width));
}

// The source: the object store that hosts share, what came from it, what went there, and its bill.

import { html, put, smallBar, swatch } from "./nodes.js";
import { bytes, count, sum } from "./numbers.js";

const STORED = ["stored", "shared_already"];
const dollars = (n) => `$${n.toFixed(n < 1 ? 4 : 2)}`;
const words = (counts) =>
  Object.entries(counts)
    .filter(([, n]) => n > 0)
    .map(([word, n]) => `${count(n)} ${word.replaceAll("_", " ")}`)
    .join(", ");

/** A bar of what succeeded and what did not, and both in words. */
function outcomes(name, counts, good) {
  const total = sum(Object.values(counts));
  const done = sum(good.map((word) => counts[word] ?? 0));
  const told = words(counts) || "none yet";
  return [
    html("p", {}, html("b", {}, name), html("span", { class: "quiet" }, ` ${told}`)),
    smallBar(
      [
        ["stored", done, good[0]],
        ["spared", total - done, "not"],
      ],
      told,
    ),
  ];
}

export function drawSource(source) {
  document.getElementById("source-card").hidden = !source;
  if (!source) return;
  const day = source.daily_bytes === null ? "" : ` of ${bytes(source.daily_bytes)}`;
  const bill = Object.entries(source.day_dollars);
  put(
    "source",
    html(
      "p",
      {},
      html("b", {}, source.address),
      html("span", { class: source.is_open ? "quiet" : "bad" }, source.is_open ? " in use" : " not in use"),
      html(
        "span",
        { class: "quiet" },
        ` · ${source.num_in_flight} of ${source.max_in_flight} in flight · share: ${source.share}`,
      ),
    ),
    outcomes("fetched bundles", source.fetches, ["arrived"]),
    outcomes("bundles to store", source.exports, STORED),
    html("ul", {}, swatch("stored", "arrived, or stored"), swatch("spared", "not")),
    html(
      "p",
      { class: "quiet" },
      `received ${bytes(source.received_bytes)}, ${count(source.num_blocks_fetched)} blocks · sent ${bytes(source.sent_bytes)}, ${bytes(source.exported_day_bytes)}${day} in 24 hours`,
    ),
    bill.length
      ? html(
          "p",
          {},
          html("b", {}, dollars(sum(bill.map(([, n]) => n)))),
          html("span", { class: "quiet" }, ` in 24 hours: ${bill.map(([word, n]) => `${word} ${dollars(n)}`).join(", ")}`),
        )
      : html("p", { class: "quiet" }, "no price is set"),
  );
}

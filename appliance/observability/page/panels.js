// Panels: figures, tables and short bars; each a function from its part of the snapshot to what is shown.

import { ANSWERS, KEPT, TIERS, answered, foundOf, hue } from "./lately.js";
import { cell, html, put, show, smallBar, svg, swatch } from "./nodes.js";
import { age, bytes, count, percent, price, seconds, sum } from "./numbers.js";
import { URGENCIES } from "./tiers.js";

const WORDS = {
  prefetch_used: "prefetched, used",
  prefetch_late: "prefetched too late",
  prefetch_wasted: "prefetched, not used",
};
const VERBS = {
  evicted: "evicted from",
  spill: "spilled from",
  copy_ahead: "copied ahead from",
  idle_copy: "idle copy from",
  archive: "archived from",
  prefetch: "prefetched into",
  condemned: "condemned in",
};

/** A decision in words: what was done, and to blocks of which tier. */
function decided({ what, tier }) {
  const verb = VERBS[what] ?? VERBS[what.slice(0, -tier.length - 1)];
  return WORDS[what] ?? (verb ? `${verb} ${tier}` : what);
}

export function drawFigures(snapshot, history) {
  const { totals, counts } = snapshot;
  const { by, asked } = answered(history, history.asked.length, 60);
  const figure = (value, label, more) =>
    html("div", {}, html("dt", {}, label), html("dd", {}, value), html("dd", { class: "quiet" }, more));
  put(
    "figures",
    figure(
      asked ? percent(1 - (by.missed + by.declined) / asked) : "–",
      "hit ratio, last minute",
      `${percent(totals.hit_ratio)} since the start`,
    ),
    figure(seconds(totals.saved_s), "prefill saved", "by the cost model"),
    figure(
      count(foundOf(totals)),
      "blocks found",
      `of ${count(totals.asked)} asked, ${bytes(totals.read_bytes)}`,
    ),
    figure(bytes(totals.loaded_bytes), "loaded first", "of what was found on nvme"),
    figure(
      count(counts.blocks),
      "blocks kept",
      `${count(totals.stored)} were put, ${bytes(totals.stored_bytes)}`,
    ),
    figure(
      count(totals.evicted),
      "evictions",
      `${count(sum(history.evicted.slice(-60)))} in the last minute`,
    ),
  );
}

export function drawSessions(sessions) {
  const { latest, by_urgency: numbers } = sessions;
  put(
    "urgencies",
    ...URGENCIES.filter((word) => numbers[word]).map((word) =>
      swatch(word, `${count(numbers[word])} ${word}`),
    ),
  );
  const ranked = [...latest].sort(
    (a, b) => URGENCIES.indexOf(a.urgency) - URGENCIES.indexOf(b.urgency) || a.idle_s - b.idle_s,
  );
  const listed = (by, words) =>
    words
      .filter((word) => by[word])
      .map((word) => `${word} ${count(by[word])}`)
      .join(", ") || "none";
  const row = (session) => {
    const places = [...TIERS, "gone"];
    const answers = { ...session.found, declined: session.declined, missed: session.missed };
    const pairs = (by, words) => words.map((word) => [hue(word), by[word], `${word}: ${count(by[word])} blocks`]);
    return html(
      "tr",
      {},
      html(
        "th",
        { scope: "row" },
        html("bdi", { title: session.name ?? null }, session.name ?? `session ${session.number}`),
      ),
      html("td", {}, html("span", { class: `chip ${session.urgency}` }, session.urgency)),
      cell(age(session.idle_s), "number"),
      html(
        "td",
        {},
        smallBar(pairs(session.blocks, places), listed(session.blocks, places)),
        html("span", { class: "quiet" }, listed(session.blocks, places)),
      ),
      cell(bytes(sum(Object.values(session.bytes))), "number"),
      html(
        "td",
        {},
        smallBar(pairs(answers, ANSWERS), listed(answers, ANSWERS)),
        html("span", { class: "quiet" }, listed(answers, ANSWERS)),
      ),
      cell(session.asked ? percent(session.hit_ratio) : "–", "number"),
      cell(seconds(session.saved_s), "number"),
    );
  };
  show(
    document.querySelector("#sessions tbody"),
    ranked.length
      ? ranked.map(row)
      : html("tr", {}, html("td", { colspan: 8, class: "quiet" }, "no sessions")),
  );
}

/** Decisions without a price have no runner-up to compare with: those of a kind are one row. */
function folded(decisions) {
  const rows = [];
  for (const decision of decisions) {
    const same =
      decision.price === null &&
      rows.find((row) => row.price === null && row.what === decision.what && row.why === decision.why);
    if (same) same.num_blocks += decision.num_blocks;
    else rows.push({ ...decision });
  }
  return rows;
}

export function drawDecisions(decisions, uptimeS) {
  const named = (block) => html("td", {}, block ? html("code", {}, block) : "–");
  const row = (decision) =>
    html(
      "tr",
      {},
      cell(age(Math.max(0, uptimeS - decision.at_s)), "number"),
      html("td", {}, html("span", { class: `dot ${hue(decision.tier)}` }), decided(decision)),
      cell(count(decision.num_blocks), "number"),
      html("td", {}, html("bdi", {}, decision.why || "–")),
      named(decision.block),
      cell(price(decision.price), "number"),
      named(decision.next_block),
      cell(price(decision.next_price), "number"),
    );
  show(
    document.querySelector("#decisions tbody"),
    decisions.length
      ? folded(decisions).map(row)
      : html("tr", {}, html("td", { colspan: 8, class: "quiet" }, "nothing was decided yet")),
  );
}

export function drawPrefetch(prefetch, policy) {
  const parts = [
    ["used", "used"],
    ["late", "too late"],
    ["wasted", "not used"],
  ];
  const total = sum(parts.map(([word]) => prefetch[word]));
  const words = parts.map(([word, name]) => `${name} ${count(prefetch[word])}`).join(", ");
  put(
    "prefetch",
    html(
      "p",
      { class: "big" },
      total ? percent(prefetch.used / total) : "–",
      html("span", { class: "quiet" }, " of prefetched blocks were used in time"),
    ),
    smallBar(
      parts.map(([word, name]) => [word, prefetch[word], `${name}: ${count(prefetch[word])} blocks`]),
      words,
    ),
    html(
      "ul",
      {},
      parts.map(([word, name]) => swatch(word, `${count(prefetch[word])} ${name}`)),
    ),
    html(
      "p",
      { class: "quiet" },
      policy.prefetch === null && !prefetch.begun
        ? "no policy prefetches"
        : `${count(prefetch.begun)} begun, ${count(prefetch.cancelled)} cancelled, ${bytes(prefetch.awaited_bytes)} up and not used yet`,
    ),
  );
}

export function drawCodecs(codecs, tiers) {
  const each = (codec) => {
    const share = codec.raw_bytes ? codec.stored_bytes / codec.raw_bytes : 1;
    const pace = codec.encode_s > 0 ? `${bytes(codec.raw_bytes / codec.encode_s)}/s encoding` : "";
    return html(
      "div",
      {},
      html(
        "p",
        {},
        html("b", {}, codec.name),
        html("span", { class: "quiet" }, ` ${bytes(codec.raw_bytes)} as ${bytes(codec.stored_bytes)}`),
        html("b", { class: "right" }, `${percent(1 - share)} saved`),
      ),
      smallBar(
        [
          ["stored", codec.stored_bytes, "stored"],
          ["spared", Math.max(0, codec.raw_bytes - codec.stored_bytes), "saved"],
        ],
        `${percent(1 - share)} saved`,
      ),
      html(
        "p",
        { class: "quiet" },
        [pace, `${count(codec.num_encoded)} encoded, ${count(codec.num_decoded)} decoded`]
          .filter(Boolean)
          .join(" · "),
      ),
    );
  };
  const hasNvme = tiers.some((tier) => tier.tier === "nvme");
  put("codecs", codecs.length ? codecs.map(each) : html("p", { class: "quiet" }, hasNvme ? "nothing was encoded yet" : "there is no nvme"));
}

export function drawPolicy(policy) {
  const names = (byTier) => {
    const all = [...new Set(Object.values(byTier))];
    return all.length === 1
      ? all[0]
      : Object.entries(byTier)
          .map(([tier, name]) => `${tier} ${name}`)
          .join(", ");
  };
  const entry = (word, value) => [html("dt", {}, word), html("dd", {}, value)];
  put(
    "policy",
    html(
      "dl",
      {},
      entry("generation", count(policy.generation)),
      entry("eviction", names(policy.eviction)),
      entry("admission", names(policy.admission)),
      entry("prefetch", policy.prefetch ?? "none"),
    ),
  );
}

function sparkline(column) {
  const top = Math.max(1, ...column);
  const points = column.map(
    (value, i) =>
      `${((160 * (KEPT - column.length + i + 0.5)) / KEPT).toFixed(1)},${(21 - (19 * value) / top).toFixed(1)}`,
  );
  return svg(
    "svg",
    {
      class: "spark",
      viewBox: "0 0 160 22",
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `at most ${bytes(top)}/s`,
    },
    svg("polyline", { points: points.join(" ") }),
  );
}

export function drawEdges(edges, history) {
  const isUsed = (edge) => edge.num_copies + edge.num_failed + edge.num_queued + edge.num_in_flight > 0;
  const row = (edge) =>
    html(
      "tr",
      {},
      html("th", { scope: "row" }, `${edge.source} → ${edge.target}`),
      cell(`${bytes(edge.bytes_per_s)}/s`, "number"),
      html("td", {}, sparkline(history.edge_bytes_per_s[`${edge.source}>${edge.target}`] ?? [])),
      cell(edge.bandwidth_bytes_per_s ? `${bytes(edge.bandwidth_bytes_per_s)}/s` : "–", "number"),
      cell(edge.num_copies ? `≤ ${seconds(edge.p50_s)}` : "–", "number"),
      cell(edge.num_copies ? `≤ ${seconds(edge.p99_s)}` : "–", "number"),
      cell(`${count(edge.num_copies)}, ${bytes(edge.bytes)}`, "number"),
      cell(count(edge.num_in_flight), "number"),
      cell(count(edge.num_queued), "number"),
      cell(count(edge.num_failed), edge.num_failed ? "number bad" : "number"),
    );
  const used = edges.filter(isUsed);
  show(
    document.querySelector("#edges tbody"),
    used.length
      ? used.map(row)
      : html("tr", {}, html("td", { colspan: 10, class: "quiet" }, "nothing was copied yet")),
  );
}

export function drawHead(snapshot) {
  const state = document.getElementById("state");
  state.dataset.state = snapshot.state;
  put("state", snapshot.state);
  put(
    "facts",
    `${snapshot.version} · up ${seconds(snapshot.uptime_s)} · policy generation ${count(snapshot.policy.generation)}`,
  );
  document.title = `${snapshot.state === "serving" ? "" : `${snapshot.state} · `}kvtier`;
}

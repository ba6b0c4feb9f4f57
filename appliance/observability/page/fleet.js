// The fleet: the hosts as this one sees them, what flows between them, and which of them is slow.

import { cell, html, put, show } from "./nodes.js";
import { bytes, count, percent } from "./numbers.js";

const SLOW = 0.5; // of the median speed
const median = (numbers) => [...numbers].sort((a, b) => a - b)[numbers.length >> 1] ?? 0;

/** What is wrong with a host, in words; empty: nothing. */
function trouble(host, usual) {
  if (host.problem) return host.problem;
  if (host.is_paused) return "not asked for a while";
  if (host.bytes_per_s && host.bytes_per_s < SLOW * usual) return "slow";
  return host.num_failed ? `${count(host.num_failed)} failed` : "";
}

export function drawFleet(fleet) {
  document.getElementById("fleet-card").hidden = !fleet;
  if (!fleet) return;
  const usual = median(fleet.hosts.map((host) => host.bytes_per_s).filter((speed) => speed > 0));
  const row = (host) =>
    html(
      "tr",
      {},
      html("th", { scope: "row" }, html("bdi", {}, host.address)),
      html("td", {}, html("bdi", {}, host.name || "–")),
      html("td", { class: host.state === "down" ? "bad" : null }, host.state),
      cell(count(host.num_blocks), "number"),
      cell(bytes(host.received_bytes), "number"),
      cell(host.bytes_per_s ? `${bytes(host.bytes_per_s)}/s` : "–", "number"),
      cell(`${count(host.num_tickets)} of ${count(host.max_tickets)}`, "number"),
      html("td", {}, html("bdi", {}, trouble(host, usual) || "–")),
    );
  show(document.querySelector("#fleet tbody"), fleet.hosts.map(row));
  const twice = fleet.held_twice === null ? "" : ` · ${percent(fleet.held_twice)} of the blocks here are held elsewhere, too`;
  put("flow", `received ${bytes(fleet.received_bytes)}, sent ${bytes(fleet.sent_bytes)}${twice}`);
}

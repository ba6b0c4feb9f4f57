// The page: hears what /api/stream says, once a second, and draws it. docs/web-api.md is the value,
// docs/web.md the picture.
//
// Every part of the page is a function from the snapshot to fresh nodes; nothing is updated by hand. A
// framework was rejected: it would bring a build, and this must work where there is no network.

import { drawHistory, sampleAt } from "./chart.js";
import { drawTiers, flow } from "./drawing.js";
import { drawFleet } from "./fleet.js";
import { KEPT, joined, know } from "./lately.js";
import { put } from "./nodes.js";
import * as panels from "./panels.js";
import { drawSource } from "./source.js";

const SCHEMA = 1;
const STALE_MS = 3500;
const RETRY_MS = 2000;
const now = {
  snapshot: null,
  history: null,
  heardAt: 0,
  isFresh: true,
  isLinear: false,
  looksAt: null,
  restarted: "",
};

function hear(snapshot) {
  if (now.snapshot && now.snapshot.epoch !== snapshot.epoch) {
    now.restarted = ` · restarted at ${new Date((snapshot.at - snapshot.uptime_s) * 1000).toLocaleTimeString()}`;
    now.isFresh = true;
  }
  now.history = now.isFresh
    ? snapshot.history
    : joined(now.history, snapshot.history, now.history.asked.length);
  now.isFresh = false;
  now.snapshot = snapshot;
  now.heardAt = performance.now();
  draw();
}

function draw() {
  const { snapshot, history } = now;
  tell();
  if (!snapshot || snapshot.schema !== SCHEMA) return;
  know(Object.keys(snapshot.totals.found));
  panels.drawHead(snapshot);
  panels.drawFigures(snapshot, history);
  drawTiers(snapshot, history, now.isLinear);
  drawHistory(history, now.looksAt);
  panels.drawSessions(snapshot.sessions);
  panels.drawDecisions(snapshot.decisions, snapshot.uptime_s);
  panels.drawPrefetch(snapshot.prefetch, snapshot.policy);
  drawSource(snapshot.source);
  drawFleet(snapshot.fleet);
  panels.drawCodecs(snapshot.codecs, snapshot.tiers);
  panels.drawPolicy(snapshot.policy);
  panels.drawEdges(snapshot.edges, history);
}

/** Say how old the picture is, and what is wrong with what it shows. */
function tell() {
  const { snapshot } = now;
  const silentMs = performance.now() - now.heardAt;
  const link = !snapshot ? "connecting" : silentMs > STALE_MS ? "stale" : "live";
  const offline = (snapshot?.tiers ?? []).filter((tier) => tier.is_offline).map((tier) => tier.tier);
  const notices = [
    link === "stale" &&
      `No word from the daemon since ${new Date(snapshot.at * 1000).toLocaleTimeString()}. This is what it said then.`,
    snapshot &&
      snapshot.schema !== SCHEMA &&
      `The daemon speaks schema ${snapshot.schema} and this page ${SCHEMA}: load it again.`,
    snapshot?.state === "draining" && "Draining: it takes nothing new, and ends when what runs is done.",
    snapshot?.state === "failed" && "The daemon has failed; its log says why. It has to be restarted.",
    snapshot?.source?.problem &&
      `The object store ${snapshot.source.is_open ? "takes nothing" : "is not used"}: ${snapshot.source.problem}.`,
    offline.length && `Offline: ${offline.join(", ")}. Blocks there are misses until the tier is back.`,
  ].filter(Boolean);
  if (document.body.dataset.link !== link) {
    document.body.dataset.link = link;
    flow(document.getElementById("drawing"));
  }
  put("link", link === "live" ? `live${now.restarted}` : link);
  put("notice", notices.join(" "));
  document.getElementById("notice").hidden = !notices.length;
}

function connect() {
  const stream = new EventSource(`/api/stream?history=${KEPT}`);
  stream.addEventListener("open", () => {
    now.isFresh = true;
  }); // every stream begins with all of the past
  stream.addEventListener("snapshot", (event) => hear(JSON.parse(event.data)));
  stream.addEventListener("error", () => {
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
  });
}

function lookAt(i) {
  now.looksAt = i;
  if (now.history) drawHistory(now.history, i);
}

function listen() {
  document.getElementById("scale").addEventListener("change", (event) => {
    now.isLinear = event.target.value === "linear";
    draw();
  });
  now.isLinear = document.querySelector("#scale input:checked").value === "linear"; // browsers remember it
  const chart = document.getElementById("history");
  const last = () => (now.history?.asked.length ?? 0) - 1;
  chart.addEventListener("pointermove", (event) => {
    lookAt(sampleAt(event, chart, last() + 1));
  });
  chart.addEventListener("pointerleave", () => lookAt(null));
  chart.addEventListener("blur", () => lookAt(null));
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30, Home: -KEPT, End: KEPT }[
      event.key
    ];
    if (!step) return;
    event.preventDefault();
    lookAt(Math.max(0, Math.min(last(), (now.looksAt ?? last()) + step)));
  });
  matchMedia("(prefers-reduced-motion: reduce)").addEventListener("change", draw);
  addEventListener("resize", draw); // drawings have other units then
  setInterval(tell, 1000);
  connect();
}

listen();

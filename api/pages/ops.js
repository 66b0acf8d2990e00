/** The operations page: reads snapshots as they come, and shows the newest. */

import { element, follow, rows, say } from "./dom.js";
import { events } from "./headrace.js";
import { ask, initKey, untilKey } from "./key.js";
import { number, seconds, showModels } from "./models.js";

const $ = (id) => document.getElementById(id);
const STALE_MS = 5000;
const WORDS = { well: "All is well", strained: "Strained", failing: "Failing", unknown: "Nothing is known" };
const sum = (counts = {}) => Object.values(counts).reduce((all, count) => all + count, 0);

let heardAt = 0, isConnected = false;

function show(snapshot) {
  showVerdict(snapshot.verdict);
  if (!snapshot.models) return; // a pod that cannot ask its broker says only that
  document.querySelector("main").dataset.stale = false;
  showFacts(snapshot);
  showModels($("models"), snapshot);
  showMoved(snapshot);
  rows($("pods"), snapshot.pods, (pod) => pod.id, (pod) =>
    [pod.url, [number(pod.streams), "n"], [number(pod.requests), "n"], `${pod.host} · ${pod.pid}`]);
  rows($("replicas"), snapshot.replicas, (each) => each.id, (each) => [each.id, each.model, `${each.state} ${each.progress}`,
    [each.running, "n"], [each.slots, "n"], [each.batch ?? "–", "n"], [each.kv_percent === null ? "–" : `${each.kv_percent} %`, "n"], [number(each.tokens_per_s), "n"], `${each.host} · ${each.pid}`]);
  showDead(snapshot);
}

function showVerdict({ state, reasons = [] }) {
  $("verdict").dataset.state = state;
  say($("verdict-word"), WORDS[state]);
  follow($("reasons"), reasons, (reason) => reason.text.replace(/\d+/g, "#"), () => element("li"), (item, reason) => {
    item.dataset.state = reason.state;
    say(item, reason.text);
  });
  document.title = `${WORDS[state]} · headrace`;
}

function showFacts({ models, pods, recent, window_s: windowS }) {
  const requests = sum(recent.requests), ok = (recent.requests?.ok ?? 0) + (recent.requests?.accepted ?? 0);
  const minutes = `${Math.round(windowS / 60)} min`;
  const facts = [
    ["Tokens a second", number(models.reduce((all, model) => all + model.tokens_per_s, 0))],
    ["Running", number(models.reduce((all, model) => all + model.running, 0))],
    ["Waiting", number(models.reduce((all, model) => all + sum(model.waiting), 0))],
    ["Open streams", number(pods.reduce((all, pod) => all + pod.streams, 0))],
    [`Requests, ${minutes}`, number(requests)],
    ["Ended whole", requests ? `${((100 * ok) / requests).toFixed(1)} %` : "–"],
    [`Failovers, ${minutes}`, number(sum(recent.failovers))],
    [`Resumes, ${minutes}`, number(sum(recent.resumes))],
  ];
  const make = ([name]) => element("div", {}, element("dt", {}, name), element("dd"));
  follow($("facts"), facts, ([name]) => name, make, (box, [, value]) => say(box.lastChild, value));
}

function showMoved({ total, recent }) {
  const kinds = { failovers: "Failover", resumes: "Resume", rejections: "Refused", cancellations: "Cancelled", requests: "Request" };
  const lines = Object.entries(kinds).flatMap(([kind, name]) =>
    Object.entries(total[kind] ?? {}).map(([word, count]) => [`${name}: ${word.replaceAll("_", " ")}`, recent[kind]?.[word] ?? 0, count]));
  const shown = lines.length ? lines : [["Nothing yet", 0, 0]];
  rows($("moved"), shown, ([name]) => name, ([name, late, all]) => [name, [number(late), "n"], [number(all), "n"]]);
}

function showDead({ dead, at_ms: atMs }) {
  $("no-dead").hidden = dead.length > 0;
  $("dead-table").hidden = !dead.length;
  rows($("dead"), dead, (each) => each.job, (each) => [[each.job, "mono"], each.model, [each.deaths, "n"], each.died_of.replaceAll("_", " "),
    each.died_with, [seconds((atMs - each.died_ms) / 1000), "n"]]);
}

/** What is shown grows old by itself, also if nothing comes. */
function age() {
  const silentMs = Date.now() - heardAt;
  if (heardAt) say($("age"), isConnected && silentMs < STALE_MS ? "live" : `last heard ${seconds(silentMs / 1000)} ago`);
  if (!heardAt || silentMs < STALE_MS) return;
  document.querySelector("main").dataset.stale = true;
  showVerdict({ state: "unknown", reasons: [{ state: "failing", text: "this pod does not answer" }] });
}

async function watch() {
  const response = await ask("/ops/events");
  if (!response.ok) {
    const { error } = await response.json().catch(() => ({}));
    showVerdict({ state: "unknown", reasons: [{ state: "failing", text: error?.message ?? `HTTP ${response.status}` }] });
    if ([401, 403].includes(response.status)) await untilKey();
    return;
  }
  for await (const event of events(response.body)) {
    if (!event.data) continue;
    [heardAt, isConnected] = [Date.now(), true];
    show(JSON.parse(event.data));
    age();
    document.documentElement.dataset.ready = "yes";
  }
}

initKey();
setInterval(age, 1000);
for (;;) {
  await watch().catch(() => {});
  isConnected = false;
  age();
  await new Promise((resolve) => setTimeout(resolve, heardAt ? 1000 : 3000));
}

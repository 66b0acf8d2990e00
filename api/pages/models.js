/** A model's card: its queue, its latency against the service level, its replicas, and what its autoscaler decided. */

import { element, follow, rows, say } from "./dom.js";
import { Spark } from "./spark.js";

const DENSE_FROM = 24;
const SHOWN_DECISIONS = 5;
const LETTERS = { starting: "start", draining: "drain" };

export const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });
export const ms = (value) => (value === null ? "–" : value < 10 ? `${value.toFixed(1)} ms` : value < 10_000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`);
export const seconds = (value) => (value < 120 ? `${Math.round(value)} s` : value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`);

/** Cards keep the sparks of their model while the page is open. */
export function showModels(parent, snapshot) {
  follow(parent, snapshot.models, (model) => model.name, makeCard, (card, model) => {
    const replicas = snapshot.replicas.filter((replica) => replica.model === model.name);
    card.show(model, replicas, snapshot);
  });
}

function makeCard(model) {
  const part = (kind, title) => {
    const head = element("h4", {}, title), note = element("span");
    head.append(note);
    return { root: element("div", { class: kind }, head), note };
  };
  const name = element("h3", { class: "name" }, model.name), chip = element("p", { class: "chip" });
  const queue = part("queue", "Queue"), latency = part("service", "Service level, last minutes");
  const bands = element("dl", { class: "bands" });
  const table = element("table", { class: "latency" }, latencyHead(), element("tbody"));
  const sparks = element("div", { class: "sparks" }), rate = new Spark("tokens a second"), waiting = new Spark("waiting and running");
  const rateBox = part("", "Tokens a second"), waitingBox = part("", "Load");
  rateBox.root.append(rate.svg);
  waitingBox.root.append(waiting.svg);
  sparks.append(rateBox.root, waitingBox.root);
  const scaling = part("scaling", "Autoscaler"), decisions = element("ol", { class: "decisions" });
  const fleet = part("fleet", "Replicas"), tiles = element("ul");
  queue.root.append(bands);
  latency.root.append(element("div", { class: "scroll" }, table));
  scaling.root.append(decisions);
  fleet.root.append(tiles);
  const card = element("article", { class: "card model", "aria-label": model.name });
  card.append(element("div", { class: "bar" }, name, chip), queue.root, sparks, latency.root, scaling.root, fleet.root);
  card.show = (now, replicas, { at_ms: atMs }) => {
    const waits = Object.values(now.waiting).reduce((sum, count) => sum + count, 0);
    say(chip, stateOf(now));
    say(queue.note, waits ? `oldest ${seconds(now.oldest_s)}` : "nothing waits");
    showBands(bands, now.waiting);
    showLatency(table.tBodies[0], now);
    rate.add(atMs, now.tokens_per_s);
    waiting.add(atMs, waits + now.running);
    say(rateBox.note, number(now.tokens_per_s));
    say(waitingBox.note, `${number(now.running)} of ${number(now.slots)} slots`);
    showDecisions(decisions, scaling, now, atMs);
    say(fleet.note, Object.entries(now.states).filter(([, count]) => count).map(([state, count]) => `${count} ${state}`).join(", ") || "none");
    showTiles(tiles, replicas);
  };
  return card;
}

function latencyHead() {
  const names = ["", "p50", "p95", "p99", "goal", "within"];
  return element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col", class: name && "n" }, name))));
}

function stateOf({ states, wanted, is_autoscaled: isAutoscaled }) {
  const ready = `${states.ready} of ${wanted} replicas ready`;
  return isAutoscaled ? `${ready}, autoscaled` : ready;
}

function showBands(list, waiting) {
  const make = ([band]) => element("div", {}, element("dt", {}, band), element("dd"));
  follow(list, Object.entries(waiting), ([band]) => band, make, (box, [, count]) => {
    say(box.lastChild, number(count));
    box.dataset.waits = count > 0;
  });
}

function showLatency(body, model) {
  const line = (name, seen) => [name, ...[seen.p50_ms, seen.p95_ms, seen.p99_ms, seen.slo_ms].map((value) => [ms(value), "n"]),
    [seen.met === null ? "–" : `${(100 * seen.met).toFixed(1)} %`, "n met"]];
  const lines = [["First token", model.ttft], ["Between tokens", model.itl]];
  rows(body, lines, ([name]) => name, ([name, seen]) => line(name, seen));
  lines.forEach(([, seen], index) => {
    body.rows[index].lastChild.dataset.state = seen.met === null ? "" : seen.met < model.attainment ? "strained" : "well";
    body.rows[index].title = `${seen.count} requests`;
  });
}

function showDecisions(list, box, model, atMs) {
  box.root.hidden = !model.is_autoscaled;
  const shown = model.decisions.slice(0, SHOWN_DECISIONS);
  say(box.note, `wants ${model.wanted}`);
  follow(list, shown, (each) => each.at_ms, () => element("li", {}, element("time"), element("b"), element("span")), (item, each) => {
    const [time, what, why] = item.children;
    say(time, seconds(Math.max(0, atMs - each.at_ms) / 1000));
    say(what, each.direction === "hold" ? `hold ${each.target}` : `${each.direction} ${each.before} → ${each.target}`);
    say(why, `${each.reason}${each.is_advice ? " (advice)" : ""}: ${each.waiting} waiting, ${each.running} running`);
  });
}

function showTiles(list, replicas) {
  const isDense = replicas.length > DENSE_FROM;
  list.className = isDense ? "dense" : "";
  follow(list, replicas, (each) => each.id, () => element("li", {}, element("b"), element("span")), (tile, each) => {
    const load = each.slots ? each.running / each.slots : 0;
    tile.dataset.state = each.state;
    tile.style.setProperty("--load", String(Math.min(1, load)));
    const engine = `batch ${each.batch ?? "?"}, KV cache ${each.kv_percent ?? "?"} %`;
    tile.title = `${each.id}\n${each.state} ${each.progress}\n${each.running} of ${each.slots} slots, ${engine}\n${number(each.tokens_per_s)} tokens/s`;
    say(tile.firstChild, each.id);
    const work = isDense ? `${Math.round(100 * load)} %` : `${each.running} of ${each.slots} · ${number(each.tokens_per_s)} tok/s`;
    say(tile.lastChild, each.state === "ready" ? work : isDense ? LETTERS[each.state] ?? each.state : `${each.state} ${each.progress}`);
  });
}

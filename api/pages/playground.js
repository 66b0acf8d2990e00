/** The playground: a form, a run, and what is shown of it. */

import { showOther } from "./frames.js";
import { apiKey, ask, initKey, askForKey } from "./key.js";
import { Markdown } from "./markdown.js";
import { figures, nameOf, Run } from "./run.js";
import { curlOf } from "./curl.js";
import { drawStrip } from "./strip.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["max_tokens", "temperature", "top_p", "seed"];
const STATES = {
  waiting: "waiting for the first token", streaming: "streaming", lost: "connection lost, going on",
  done: "done", cancelled: "cancelled", failed: "failed",
};
const MOST = 200_000; // characters of frames that are kept in view

const markdown = new Markdown($("text"));
let run, unshown = "", frames = "", isDue = false, others, pods = [location.origin];

/** The body of the request that the form describes; what is not said is left out. */
function bodyOfForm() {
  const turns = [["system", $("system").value.trim()], ["user", $("prompt").value]];
  const messages = turns.filter(([, content]) => content).map(([role, content]) => ({ role, content }));
  const body = { model: $("model").value, messages };
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  if ($("stop").value) body.stop = $("stop").value;
  if ($("service_tier").value !== "default") body.service_tier = $("service_tier").value;
  return body;
}

async function send() {
  if (run && !run.isOver) return;
  reset();
  const mine = (run = new Run(pods, bodyOfForm(), apiKey(), {
    text: (text) => ((unshown += text), draw()),
    thought: (text) => (($("thought-box").hidden = false), $("thought").append(text)),
    bytes: (text) => ((frames += text), draw()),
    note: addNote,
    change: () => (follow(), showCurl(), draw()),
  }));
  draw();
  const beat = setInterval(draw, 100); // the time goes on also when nothing comes
  await mine.go();
  clearInterval(beat);
  sayEnd();
  draw();
  if (mine.error?.status === 401 && (await askForKey(mine.error.message))) await send();
}

function reset() {
  markdown.clear();
  others?.abort();
  others = undefined;
  unshown = frames = "";
  for (const id of ["frames", "other", "notes", "thought"]) $(id).replaceChildren();
  $("thought-box").hidden = $("error").hidden = true;
  $("text").setAttribute("aria-busy", "true");
  if (matchMedia("(max-width: 900px)").matches) $("answer-title").scrollIntoView();
}

/** The same job in another format, as soon as it is known; read at another pod if there is one. */
function follow() {
  if (!run.job || others) return;
  $("job").textContent = `job ${run.job}`;
  others = new AbortController();
  const at = pods.find((pod) => pod !== run.at) ?? run.at;
  showOther($("other"), at, run.job, $("format").value, apiKey(), others.signal);
}

function refollow() {
  if (!run?.job) return;
  others?.abort();
  others = undefined;
  $("other").replaceChildren();
  follow();
}

function addNote(text, kind = "") {
  const item = document.createElement("li"), time = document.createElement("time"), said = document.createElement("span");
  time.textContent = `${(run.elapsed / 1000).toFixed(2)} s`;
  said.textContent = text;
  item.dataset.kind = kind;
  item.append(time, said);
  $("notes").append(item);
  $("status").textContent = text;
}

function sayEnd() {
  const { ttft, tokens } = figures(run);
  const why = { length: ", at its limit", stop: "", tool_calls: ", with a tool call" }[run.finishReason] ?? "";
  const says = {
    done: [`done: ${tokens} tokens${why}${run.cuts ? `, ${run.cuts} times cut and nothing lost` : ""}`, "good"],
    cancelled: ["cancelled, and so was the job", ""],
    failed: [run.error?.message ?? "failed", "bad"],
  };
  addNote(...says[run.state]);
  $("text").setAttribute("aria-busy", "false");
  $("error").hidden = run.state !== "failed";
  $("error").textContent = run.state === "failed" ? `${run.error.message} ${run.error.code ? `(${run.error.code})` : ""}` : "";
  if (run.state === "done" && ttft === undefined) addNote("the answer has no text");
}

/** Once a frame of the screen at most, however many tokens come. */
function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    const text = $("text"), isAtEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    if (unshown) markdown.push(unshown);
    unshown = "";
    if (isAtEnd) text.scrollTop = text.scrollHeight;
    showFrames();
    showFigures();
    showState();
    drawStrip($("strip"), $("strip-end"), run);
  });
}

function showFrames() {
  const pane = $("frames");
  if (!frames) return;
  pane.append(frames);
  frames = "";
  while (pane.textContent.length > MOST && pane.childNodes.length > 1) pane.firstChild.remove();
  pane.scrollTop = pane.scrollHeight;
}

function showFigures() {
  const { ttft, itl, rate, tokens } = figures(run), ms = (value) => (value === undefined ? "–" : `${Math.round(value)} ms`);
  $("ttft").textContent = ttft === undefined && !run.isOver ? `${(run.elapsed / 1000).toFixed(1)} s …` : ms(ttft);
  $("itl").textContent = itl !== undefined && itl < 10 ? `${itl.toFixed(1)} ms` : ms(itl);
  $("rate").textContent = rate === undefined ? "–" : rate.toFixed(rate < 100 ? 1 : 0);
  $("tokens").textContent = tokens || "–";
}

function showState() {
  const at = run.at && !run.isOver ? ` at ${nameOf(run.at)}` : "";
  $("state").textContent = STATES[run.state] + (run.state === "streaming" ? at : "");
  $("state").dataset.state = run.state;
  $("send").disabled = !run.isOver;
  $("cancel").disabled = $("cut").disabled = run.isOver;
  $("cut-to").disabled = run.isOver || $("pod").disabled;
}

function showCurl() {
  $("curl").textContent = curlOf(location.origin, bodyOfForm(), Boolean(apiKey()), run);
}

async function loadModels() {
  const response = await ask("/v1/models");
  if (!response.ok) return fail(`The models cannot be listed: HTTP ${response.status}.`);
  const { data } = await response.json();
  const wanted = $("model").value || new URLSearchParams(location.search).get("model");
  $("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === wanted)));
  showCurl();
}

async function loadPods() {
  const response = await ask("/v1/pods");
  const { data } = response.ok ? await response.json() : { data: [] };
  const rest = data.filter((pod) => !pod.is_this).map((pod) => pod.url);
  pods = [location.origin, ...rest];
  $("pod").replaceChildren(...rest.map((url) => new Option(nameOf(url), url)));
  if (!rest.length) $("pod").append(new Option("no other pod here", ""));
  $("pod").disabled = !rest.length;
}

function fail(message) {
  $("error").textContent = message;
  $("error").hidden = false;
}

function onKey(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  else if (event.key === "Escape" && run && !run.isOver && !document.querySelector("dialog[open]")) run.cancel();
  else return;
  event.preventDefault();
}

initKey();
$("ask").addEventListener("submit", (event) => (event.preventDefault(), send()));
$("ask").addEventListener("input", showCurl);
$("cancel").addEventListener("click", () => run.cancel());
$("cut").addEventListener("click", () => run.cut());
$("cut-to").addEventListener("click", () => run.cut($("pod").value));
$("format").addEventListener("change", refollow);
$("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText($("curl").textContent).catch(() => {});
  $("status").textContent = $("copy").textContent = "Copied";
  setTimeout(() => ($("copy").textContent = "Copy"), 1500);
});
document.addEventListener("keydown", onKey);
await loadModels().catch((error) => fail(`This pod does not answer: ${error.message}`));
await loadPods().catch(() => {});
document.documentElement.dataset.ready = "yes";

/** One question and its answer, over connections that may be cut on purpose: what the playground's buttons do. */

import { chat, HeadraceError } from "./headrace.js";

/** `on` is told everything: `text`, `thought`, `bytes` (as they came), `note` (what happened), `change` (of `state`). */
export class Run {
  constructor(urls, body, apiKey, on) {
    Object.assign(this, { urls, body, apiKey, on, state: "waiting", job: "", position: "", at: "", cuts: 0 });
    this.times = []; // of each piece of text, in ms since the question was sent
    this.lost = []; // [from, to] of each time without a connection
    this.stopper = new AbortController();
  }

  /** Ask, and read to the end, whatever happens on the way; throws nothing. */
  async go() {
    this.startedAt = performance.now();
    const options = { apiKey: this.apiKey, signal: this.stopper.signal, fetch: (...asked) => this.#fetch(...asked) };
    try {
      for await (const chunk of chat(this.urls, this.body, options)) this.#take(chunk);
      this.#become("done");
    } catch (error) {
      this.error = error;
      this.#become(this.stopper.signal.aborted || error.code === "cancelled" ? "cancelled" : "failed");
    }
    this.endedAt = this.elapsed;
  }

  get elapsed() {
    return performance.now() - this.startedAt;
  }

  get isOver() {
    return ["done", "cancelled", "failed"].includes(this.state);
  }

  /** Break the connection under the stream; it goes on by itself, at `next` if that is given. */
  cut(next) {
    if (this.isOver || !this.connection) return;
    this.cuts += 1;
    this.next = next;
    this.connection.abort(new TypeError("the connection was cut"));
  }

  cancel() {
    if (!this.isOver) this.stopper.abort(new HeadraceError("Cancelled.", { code: "cancelled" }));
  }

  #take(chunk) {
    this.position = chunk.position;
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.finishReason) this.finishReason = chunk.finishReason;
    if (chunk.reasoning) this.on.thought(chunk.reasoning);
    if (!chunk.text && !chunk.reasoning) return;
    this.times.push(this.elapsed);
    if (this.state !== "streaming") this.#become("streaming");
    if (chunk.text) this.on.text(chunk.text);
  }

  #become(state) {
    this.state = state;
    this.on.change();
  }

  /** What stands in for the platform's: it knows the connection, may break it, and shows the bytes that come. */
  async #fetch(address, options) {
    const url = new URL(address, location.href);
    const isStream = options.method === "POST" || options.headers["Last-Event-ID"] || !options.method;
    if (!isStream || this.stopper.signal.aborted) return fetch(url, options);
    const at = this.next ?? url.origin, connection = (this.connection = new AbortController());
    this.next = undefined;
    const signal = AbortSignal.any([options.signal, connection.signal]);
    try {
      const response = await fetch(at + url.pathname, { ...options, signal });
      if (response.ok) {
        this.#connected(at, response.headers.get("x-request-id"));
        return this.#watched(response);
      }
      this.on.note(`${nameOf(at)} answered ${response.status}`, "bad");
      return response;
    } catch (error) {
      this.#lose(`no answer from ${nameOf(at)}`);
      throw error;
    }
  }

  #connected(at, job) {
    const lost = this.lost.at(-1), isBack = lost && lost[1] === undefined;
    if (isBack) lost[1] = this.elapsed;
    this.job ||= job ?? "";
    this.at = at;
    const what = this.position ? `after ${placeOf(this.position)}` : "";
    this.on.note(isBack ? `back at ${nameOf(at)} ${what}` : `connected to ${nameOf(at)}`, isBack ? "good" : "");
    this.on.change();
  }

  #lose(why) {
    if (this.isOver || this.stopper.signal.aborted) return;
    if (!this.lost.length || this.lost.at(-1)[1] !== undefined) this.lost.push([this.elapsed]);
    this.on.note(this.position ? `${why}, ${placeOf(this.position)} was the last that came` : why, "bad");
    this.state = "lost";
    this.on.change();
  }

  #watched(response) {
    const decoder = new TextDecoder(), reader = response.body.getReader();
    let isLeft = false; // by who reads it: what comes then is no loss
    const body = new ReadableStream({
      pull: async (controller) => {
        const { value, done, error } = await reader.read().catch((error) => ({ error }));
        if (isLeft) return;
        if (error) {
          this.#lose(this.connection.signal.aborted ? "connection cut" : "connection lost");
          controller.error(error);
        } else if (done) {
          controller.close();
        } else {
          this.on.bytes(decoder.decode(value, { stream: true }));
          controller.enqueue(value);
        }
      },
      cancel: (reason) => ((isLeft = true), reader.cancel(reason)),
    });
    return new Response(body, { status: response.status, headers: response.headers });
  }
}

export const nameOf = (origin) => new URL(origin, location.href).host;

/** A position without the job's id: `<attempt>-<n>`. */
export const placeOf = (position) => position.slice(position.indexOf(".") + 1);

/** What can be said of a run's speed: milliseconds, and tokens a second. */
export function figures(run) {
  const { times, usage } = run, gaps = times.slice(1).map((time, index) => time - times[index]);
  const count = usage?.completion_tokens ?? times.length, span = times.at(-1) - times[0];
  return {
    ttft: times[0],
    itl: gaps.length ? gaps.toSorted((a, b) => a - b)[gaps.length >> 1] : undefined,
    rate: times.length > 1 && span > 0 ? ((count - 1) * 1000) / span : undefined,
    tokens: count,
  };
}

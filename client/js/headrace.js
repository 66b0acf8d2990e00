/** Chat over HTTP that outlives its connections, for browsers and Node: an ES module without dependencies.
 *
 * A stream is a job in the server's log. Each event names its position; when a connection is lost, the next pod is
 * asked for what follows the last position that was seen, so the text has no hole and nothing twice. The request itself
 * carries an Idempotency-Key, so that it can be sent again, and makes one job all the same.
 */

/** What the server says is wrong; `status` is 0 if the answer had begun. */
export class HeadraceError extends Error {
  constructor(message, { code, status = 0, retryAfterS } = {}) {
    super(message);
    Object.assign(this, { name: "HeadraceError", code, status, retryAfterS });
  }
}

/** What a pod says of itself and not of a job: another pod, or a later time, may say otherwise. */
const PASSING = new Set(["broker_down", "broker_full", "internal_error", "unavailable", undefined]);

/** Yields `{text, reasoning, finishReason, usage, choice, position}`; what a chunk does not say is "" or undefined.
 *
 * `urls` are the pods' addresses, `body` the fields of OpenAI's chat route. Leaving the loop or aborting `signal`
 * cancels the job. Throws HeadraceError, or `signal`'s reason; after `giveUpMs` without a byte, the last error.
 * `fetch` stands in for the platform's, for who wants to see or to break connections.
 */
export async function* chat(urls, body, options = {}) {
  const { apiKey, signal, giveUpMs = 60_000, silenceMs = 60_000, onReconnect, fetch = globalThis.fetch } = options;
  const headers = { "X-On-Disconnect": String(Math.min(giveUpMs / 1000, 86_400)) };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const key = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0"));
  const request = {
    method: "POST",
    headers: { ...headers, "Content-Type": "application/json", "Idempotency-Key": key.join("") },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  };
  let job = "", position = "", isOver = false, lostAt = 0, tries = 0;
  try {
    for (let pod = 0; ; pod = (pod + 1) % urls.length) {
      const connection = new AbortController(), abort = () => connection.abort(signal.reason);
      let silence;
      const heard = () => (clearTimeout(silence), (silence = setTimeout(() => connection.abort(), silenceMs)));
      try {
        signal?.throwIfAborted();
        signal?.addEventListener("abort", abort);
        heard();
        const resumed = { headers: { ...headers, ...(position && { "Last-Event-ID": position }) } };
        const address = urls[pod] + (job ? `/v1/streams/${job}` : "/v1/chat/completions");
        const response = await fetch(address, { ...(job ? resumed : request), signal: connection.signal });
        if (!response.ok) throw await refusal(response);
        if (job) onReconnect?.(urls[pod]);
        job ||= response.headers.get("x-request-id") ?? "";
        for await (const event of events(response.body)) {
          [lostAt, tries] = [0, 0];
          heard();
          if (event.data === undefined) continue;
          if ((isOver = event.data === "[DONE]")) return;
          const frame = JSON.parse(event.data);
          if ((isOver = Boolean(frame.error))) throw new HeadraceError(frame.error.message, frame.error);
          position = event.id || position;
          const chunk = chunkOf(frame, position);
          if (chunk.text || chunk.reasoning || chunk.finishReason || chunk.usage || chunk.toolCalls) yield chunk;
        }
      } catch (error) {
        signal?.throwIfAborted();
        lostAt ||= Date.now();
        const isBusy = job && [408, 429].includes(error.status);
        const isPassing = isBusy || (error.status >= 500 && PASSING.has(error.code));
        isOver ||= error instanceof HeadraceError && !isPassing;
        if (isOver || Date.now() - lostAt > giveUpMs) throw error;
      } finally {
        clearTimeout(silence);
        signal?.removeEventListener("abort", abort);
      }
      const limitMs = Math.min(5000, 100 * 2 ** Math.min(tries++, 16));
      await new Promise((resolve) => setTimeout(resolve, Math.random() * limitMs));
    }
  } finally {
    if (!isOver) await abandon(urls, job, request, headers);
  }
}

/** End a job, wherever it runs; answers what it was: "waiting", "running" or "ended". Safe to repeat. */
export async function cancel(urls, job, { apiKey, signal } = {}) {
  let trouble;
  for (const url of urls) {
    try {
      const headers = apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
      const response = await fetch(`${url}/v1/streams/${job}`, { method: "DELETE", headers, signal });
      if (response.ok) return (await response.json()).was;
      trouble = await refusal(response);
      if (response.status < 500) break;
    } catch (error) {
      trouble = error;
    }
  }
  throw trouble;
}

/** Nobody wants the answer any more. A job whose id never came is asked for by its key. */
async function abandon(urls, job, request, headers) {
  const signal = AbortSignal.timeout(5000);
  try {
    if (!job) {
      const response = await fetch(urls[0] + "/v1/chat/completions", { ...request, signal });
      job = response.headers.get("x-request-id");
      response.body?.cancel();
    }
    if (job) await cancel(urls, job, { apiKey: headers.Authorization?.slice("Bearer ".length), signal });
  } catch {}
}

/** Server-sent events; one without `data` for what has none, such as a heartbeat. Throws if the body just ends. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = "", event = {}; ; ) {
      const { value, done } = await reader.read();
      if (done) throw new TypeError("the body ended before the stream");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      yield {};
      for (const line of lines) {
        const [, name, text] = /^([^:]*):? ?(.*?)\r?$/.exec(line);
        if (name) event[name] = text;
        else if (line.trim() === "") [event] = [{}, yield event];
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

function chunkOf(frame, position) {
  const { delta = {}, finish_reason: finishReason, index: choice = 0 } = frame.choices[0] ?? {};
  const { content, reasoning_content: reasoning, tool_calls: toolCalls } = delta;
  const said = { text: content ?? "", reasoning: reasoning ?? "", toolCalls, finishReason: finishReason ?? undefined };
  return { ...said, usage: frame.usage ?? undefined, choice, position };
}

async function refusal(response) {
  const after = response.headers.get("retry-after");
  const { error } = await response.json().catch(() => ({}));
  const more = { code: error?.code, status: response.status, retryAfterS: after ? Number(after) : undefined };
  return new HeadraceError(error?.message ?? `HTTP ${response.status}`, more);
}

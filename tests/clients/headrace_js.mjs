// What tests ask of client/js/headrace.js, here in node.

const { chat, cancel, HeadraceError } = await import(process.env.HEADRACE_JS);
const urls = process.env.URLS.split(" ");
const messages = [{ role: "user", content: "hi" }];

async function read(chunks) {
  const seen = { text: "", reasoning: "", calls: [] };
  for await (const chunk of chunks) {
    seen.text += chunk.text;
    seen.reasoning += chunk.reasoning;
    seen.calls.push(...(chunk.toolCalls ?? []));
    if (chunk.finishReason) seen.finishReason = chunk.finishReason;
    if (chunk.usage) seen.tokens = chunk.usage.completion_tokens;
  }
  return seen;
}

async function thrown(promise) {
  try {
    await promise;
  } catch (error) {
    return { name: error.name, code: error.code, status: error.status, isOurs: error instanceof HeadraceError };
  }
}

const tasks = {
  streams: () => read(chat(urls, { model: "scripted", messages, max_tokens: 8 })),
  calls: () => read(chat(urls, { model: "caller", messages })),
  async leaves() {
    for await (const chunk of chat(urls, { model: "scripted", messages, max_tokens: 5000 })) {
      return chunk.position.split(".")[0];
    }
  },
  async aborts() {
    const stop = new AbortController();
    setTimeout(() => stop.abort(), 300);
    return thrown(read(chat(urls, { model: "scripted", messages, max_tokens: 5000 }, { signal: stop.signal })));
  },
  async abortsAtOnce() {
    const stop = new AbortController();
    setTimeout(() => stop.abort(), 1);
    return thrown(read(chat(urls, { model: "scripted", messages, max_tokens: 5000 }, { signal: stop.signal })));
  },
  async cancels() {
    let was;
    const error = await thrown(
      (async () => {
        for await (const chunk of chat(urls, { model: "scripted", messages, max_tokens: 5000 })) {
          was ??= await cancel([...urls].reverse(), chunk.position.split(".")[0]);
        }
      })(),
    );
    return { was, error };
  },
  refused: () => thrown(read(chat(urls, { model: "nobody", messages }))),
  fails: () => thrown(read(chat(urls, { model: "broken", messages }))),
  async giveUp() {
    const asked = chat(["http://127.0.0.1:1"], { model: "scripted", messages }, { giveUpMs: 200 });
    return thrown(read(asked));
  },
  async resumes() {
    const places = [];
    const options = { silenceMs: 5000, onReconnect: (url) => places.push(url) };
    const seen = await read(chat(process.argv[3].split(" "), { model: "scripted", messages, max_tokens: 60 }, options));
    return { ...seen, places };
  },
};

console.log(JSON.stringify((await tasks[process.argv[2]]()) ?? null));

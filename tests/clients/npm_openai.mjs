// npm `openai`.

import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.URLS.split(" ")[0] + "/v1", apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const tool = JSON.parse(process.argv[3] ?? "null");

async function thrown(promise) {
  try {
    await promise;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code, message: error.message };
  }
}

async function text(stream) {
  let said = "";
  for await (const chunk of stream) said += chunk.choices[0]?.delta.content ?? "";
  return said;
}

const tasks = {
  async streams() {
    const asked = { model: "scripted", messages, max_tokens: 8 };
    const stream = await client.chat.completions.create({ ...asked, stream: true });
    const whole = await client.chat.completions.create(asked);
    return { streamed: await text(stream), whole: whole.choices[0].message.content, usage: whole.usage };
  },
  async calls() {
    const stream = client.chat.completions.stream({ model: "caller", messages, tools: [tool] });
    const { message } = (await stream.finalChatCompletion()).choices[0];
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "rain" };
    const turns = [...messages, message, result];
    const next = await client.chat.completions.create({ model: "scripted", messages: turns, max_tokens: 2 });
    return { message, next: next.choices[0].message.content };
  },
  async responds() {
    const stream = client.responses.stream({ model: "scripted", input: "hi", max_output_tokens: 8 });
    return (await stream.finalResponse()).output_text;
  },
  async leaves() {
    const asked = { model: "scripted", messages, max_tokens: 5000, stream: true };
    for await (const _ of await client.chat.completions.create(asked)) break;
  },
  async embeds() {
    const made = await client.embeddings.create({ model: "scripted", input: ["one", "two"] });
    return made.data.map((each) => each.embedding.length);
  },
  async errors() {
    const refused = await thrown(client.chat.completions.create({ model: "nobody", messages }));
    const asked = { model: "broken", messages, stream: true };
    const failed = await thrown(client.chat.completions.create(asked).then(text));
    return { refused, failed };
  },
};

console.log(JSON.stringify((await tasks[process.argv[2]]()) ?? null));

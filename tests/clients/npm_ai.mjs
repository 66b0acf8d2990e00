// Vercel's `ai` SDK with its provider for what is OpenAI-compatible.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const headrace = createOpenAICompatible({
  name: "headrace",
  baseURL: process.env.URLS.split(" ")[0] + "/v1",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = (model, more = {}) => ({ model: headrace(model), prompt: "hi", maxRetries: 0, ...more });

const tasks = {
  async streams() {
    const stream = streamText(asked("scripted", { maxOutputTokens: 8 }));
    let streamed = "";
    for await (const part of stream.textStream) streamed += part;
    const whole = await generateText(asked("scripted", { maxOutputTokens: 8 }));
    const [reason, usage] = [await stream.finishReason, await stream.usage];
    return { streamed, whole: whole.text, reason, tokens: usage.outputTokens };
  },
  async calls() {
    const given = [];
    const { name, description, parameters } = JSON.parse(process.argv[3]);
    const execute = async (input) => (given.push(input), "rain");
    const tools = { [name]: tool({ description, inputSchema: jsonSchema(parameters), execute }) };
    const stream = streamText(asked("caller", { tools, stopWhen: stepCountIs(2) }));
    await stream.consumeStream();
    const steps = await stream.steps;
    return { given, steps: steps.length, text: steps[0].text, reasoning: steps[0].reasoningText };
  },
  async objects() {
    const schema = z.object({ place: z.string(), rain: z.boolean() });
    return (await generateObject(asked("scripted", { schema }))).object;
  },
  async leaves() {
    const stop = new AbortController();
    const stream = streamText(asked("scripted", { maxOutputTokens: 5000, abortSignal: stop.signal }));
    for await (const part of stream.fullStream) if (part.type === "text-delta") stop.abort();
  },
  async errors() {
    let refused;
    try {
      await generateText(asked("nobody"));
    } catch (error) {
      refused = { name: error.name, status: error.statusCode, message: error.message };
    }
    const failed = [];
    let said = "";
    for await (const part of streamText(asked("broken", { onError() {} })).fullStream) {
      if (part.type === "text-delta") said += part.text;
      if (part.type === "error") failed.push(part.error.message ?? String(part.error));
    }
    return { refused, said, failed };
  },
};

console.log(JSON.stringify((await tasks[process.argv[2]]()) ?? null));

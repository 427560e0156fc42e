// Vercel's AI SDK, asked by lines of JSON: {id, method, args} in, {id, result} or {id, error} out.
// Its methods are those of tests/clients/client.py.

import { createInterface } from "node:readline";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const { BASE_URL: baseURL, KEY: apiKey, MODEL: name, RETRIES, PROVIDER, RESULT } = process.env;
const system = "You are an agent.";
const compatible = createOpenAICompatible({
  name: "fairstream",
  baseURL,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey });
const model = PROVIDER === "openai" ? openai.chat(name) : compatible.chatModel(name);
const common = { model, maxRetries: Number(RETRIES), onError: () => {} };

const place = z.object({
  city: z.enum(["Paris", "London", "Rome"]),
  country: z.enum(["FR", "UK", "IT"]).optional(),
});
const hours = z.number().int().min(1).max(48);
const word = z.string().max(8);
const described = (description, shape) =>
  tool({ description, inputSchema: z.object(shape), execute: async () => RESULT });
const tools = {
  Weather: described("The weather in a place.", {
    place: place.describe("Where"),
    unit: z.enum(["celsius", "fahrenheit"]).default("celsius"),
  }),
  Clock: described("The time now.", {}),
  Flights: described("Flights between two places.", {
    origin: place,
    target: place,
    seats: z.number().int().min(1).max(9).optional(),
  }),
  Convert: described("Converts an amount of money.", {
    amount: z.number().min(0).max(1000),
    currencies: z.array(z.enum(["EUR", "GBP", "USD"])).length(2),
  }),
  Remind: described("Reminds the user of something.", {
    about: z.enum(["tea", "train", "call"]),
    hours,
  }),
  Events: described("The events of a day.", {
    day: z.enum(["today", "tomorrow"]),
    kinds: z.array(z.enum(["work", "home"])).max(2).optional(),
  }),
  Message: described("Sends a message.", { to: word, urgent: z.boolean() }),
  Notes: described("Finds notes.", { words: word, newest: z.boolean().nullable() }),
  Translate: described("Translates a word.", { word, language: z.enum(["fr", "it"]) }),
  Hotel: described("Books a hotel.", { place, nights: z.number().int().min(1).max(9) }),
  Timer: described("Starts a timer.", { hours }),
  Rate: described("Rates the answer.", { stars: z.union([1, 2, 3, 4, 5].map((n) => z.literal(n))) }),
};
const verdict = z.object({
  city: z.enum(["Paris", "London", "Rome"]),
  warm: z.boolean(),
  why: z.enum(["weather", "season"]).nullable(),
});

const choose = (choice) => (choice in tools ? { type: "tool", toolName: choice } : choice);

// A streamed run, read to its end, looks like a plain one.
async function run(stream, options) {
  if (!stream) return await generateText({ ...common, ...options });
  const errors = [];
  const streamed = streamText({ ...common, ...options, onError: ({ error }) => errors.push(error) });
  await streamed.consumeStream();
  if (errors.length) throw errors[0];
  return {
    text: await streamed.text,
    steps: await streamed.steps,
    response: await streamed.response,
    output: options.output && (await streamed.output),
  };
}

// Results of calls that have none: the library runs no tool where the limit has ended an answer.
function missing(messages) {
  const parts = messages.flatMap(({ content }) => (Array.isArray(content) ? content : []));
  const results = new Set(parts.filter(({ type }) => type === "tool-result").map(({ toolCallId }) => toolCallId));
  return parts
    .filter(({ type, toolCallId }) => type === "tool-call" && !results.has(toolCallId))
    .map(({ toolCallId, toolName }) => ({
      role: "tool",
      content: [{ type: "tool-result", toolCallId, toolName, output: { type: "text", value: RESULT } }],
    }));
}

const methods = {
  async agent(question, choices, count, stream) {
    const { steps, output } = await run(stream, {
      system,
      prompt: question,
      tools: Object.fromEntries(Object.entries(tools).slice(0, count)),
      output: Output.object({ schema: verdict }),
      maxOutputTokens: 200,
      stopWhen: stepCountIs(choices.length),
      prepareStep: ({ stepNumber }) => ({ toolChoice: choose(choices[stepNumber]) }),
    });
    const turns = steps.map(({ toolCalls }) =>
      toolCalls.map(({ toolName, input, invalid }) => {
        if (invalid) throw new Error(`not by the schema: ${JSON.stringify(input)}`);
        return [toolName, input];
      }),
    );
    const tokens = steps.reduce((sum, { usage }) => sum + usage.outputTokens, 0);
    return { turns: turns.slice(0, -1), verdict: output, tokens };
  },

  async decide(question) {
    const options = { prompt: question, output: Output.object({ schema: verdict }) };
    return (await generateText({ ...common, ...options })).output;
  },

  async cut(question, limit, stream) {
    const asked = { messages: [{ role: "user", content: question }], system };
    const two = { Weather: tools.Weather, Clock: tools.Clock };
    const options = { tools: two, maxOutputTokens: limit, toolChoice: choose("Weather") };
    let messages = [];
    try {
      messages = (await run(stream, { ...asked, ...options })).response.messages;
    } catch (error) {
      // It refuses an answer that was cut before its call has begun.
      if (error.name !== "AI_ToolChoiceViolationError") throw error;
    }
    asked.messages.push(...messages, ...missing(messages), { role: "user", content: "Go on." });
    const last = { tools: two, maxOutputTokens: 3, toolChoice: "none" };
    return (await run(false, { ...asked, ...last })).text;
  },

  async ask(question, stream) {
    return (await run(stream, { prompt: question })).text;
  },

  async leave(question) {
    const controller = new AbortController();
    const { textStream } = streamText({ ...common, prompt: question, abortSignal: controller.signal });
    for await (const _ of textStream) controller.abort();
  },

  async show_image() {
    const data = new Uint8Array([137, 80, 78, 71, 13, 10, 26, 10]);
    const image = { type: "file", data, mediaType: "image/png" };
    const content = [{ type: "text", text: "What is it?" }, image];
    return (await generateText({ ...common, messages: [{ role: "user", content }] })).text;
  },

  async embed() {
    await embed({ model: compatible.embeddingModel(name), value: "Paris", maxRetries: 0 });
  },

  async respond() {
    await generateText({ model: openai.responses(name), prompt: "Paris", maxRetries: 0 });
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { id, method, args } = JSON.parse(line);
  methods[method](...args).then(
    (result) => console.log(JSON.stringify({ id, result: result ?? null })),
    (error) => console.log(JSON.stringify({ id, error: `${error.name}: ${error.message}` })),
  );
}

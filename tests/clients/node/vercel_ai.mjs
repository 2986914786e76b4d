// Vercel AI SDK over its provider for OpenAI-compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ANSWER, AS_JSON, BASE_URL, HELLO, MODEL, SAID, THOUGHT, WEATHER, run, same } from "./features.mjs";

const asIs = createOpenAICompatible({ name: "modelserve", baseURL: BASE_URL, apiKey: "none" });
const constraining = createOpenAICompatible({
  name: "modelserve", baseURL: BASE_URL, apiKey: "none", supportsStructuredOutputs: true,
});
const model = asIs(MODEL);
const maxRetries = 0;

function withTool() {
  const asked = [];
  const getWeather = tool({
    description: "The weather in a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => asked.push(city) && "21",
  });
  return [asked, { model, maxRetries, prompt: WEATHER, tools: { get_weather: getWeather }, stopWhen: stepCountIs(3) }];
}

await run({
  async chat() {
    same((await generateText({ model, maxRetries, prompt: HELLO })).text, SAID);
  },
  async stream() {
    same(await streamText({ model, maxRetries, prompt: HELLO }).text, SAID);
  },
  async tools() {
    const [asked, call] = withTool();
    same((await generateText(call)).text, ANSWER);
    same(asked, ["Paris"]);
  },
  async tools_stream() {
    const [asked, call] = withTool();
    same(await streamText(call).text, ANSWER);
    same(asked, ["Paris"]);
  },
  async structured() {
    const schema = z.object({ city: z.string(), degrees: z.number() });
    for (const provider of [constraining, asIs]) {
      const { object } = await generateObject({ model: provider(MODEL), maxRetries, schema, prompt: AS_JSON });
      same(object, { city: "Paris", degrees: 21 });
    }
  },
  async reasoning() {
    const providerOptions = { modelserve: { reasoningEffort: "low" } };
    same((await generateText({ model, maxRetries, prompt: HELLO, providerOptions })).reasoningText, THOUGHT);
  },
});

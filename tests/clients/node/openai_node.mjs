// openai, the Node client.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ANSWER, AS_JSON, BASE_URL, HELLO, MODEL, SAID, THOUGHT, WEATHER, run, same } from "./features.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tool = { type: "function", function: { name: "get_weather", description: "The weather in a city", parameters } };
const ask = (text) => [{ role: "user", content: text }];

async function secondTurn(message) {
  const [call] = message.tool_calls;
  same(JSON.parse(call.function.arguments), { city: "Paris" });
  const messages = [...ask(WEATHER), message, { role: "tool", tool_call_id: call.id, content: "21" }];
  const answer = await client.chat.completions.create({ model: MODEL, messages, tools: [tool] });
  same(answer.choices[0].message.content, ANSWER);
}

await run({
  async chat() {
    const answer = await client.chat.completions.create({ model: MODEL, messages: ask(HELLO) });
    same(answer.choices[0].message.content, SAID);
  },
  async stream() {
    const answer = client.chat.completions.stream({ model: MODEL, messages: ask(HELLO) });
    same((await answer.finalChatCompletion()).choices[0].message.content, SAID);
  },
  async tools() {
    const answer = await client.chat.completions.create({ model: MODEL, messages: ask(WEATHER), tools: [tool] });
    await secondTurn(answer.choices[0].message);
  },
  async tools_stream() {
    const answer = client.chat.completions.stream({ model: MODEL, messages: ask(WEATHER), tools: [tool] });
    await secondTurn((await answer.finalChatCompletion()).choices[0].message);
  },
  async structured() {
    const format = zodResponseFormat(z.object({ city: z.string(), degrees: z.number() }), "weather");
    const answer = await client.chat.completions.parse({ model: MODEL, messages: ask(AS_JSON), response_format: format });
    same(answer.choices[0].message.parsed, { city: "Paris", degrees: 21 });
  },
  async reasoning() {
    const asked = { model: MODEL, messages: ask(HELLO), reasoning_effort: "low" };
    same((await client.chat.completions.create(asked)).choices[0].message.reasoning_content, THOUGHT);
  },
  async responses() {
    const asked = { model: MODEL, tools: [{ type: "function", ...tool.function, strict: false }] };
    const first = await client.responses.stream({ ...asked, input: WEATHER }).finalResponse();
    const call = first.output.find((item) => item.type === "function_call");
    const result = { type: "function_call_output", call_id: call.call_id, output: "21" };
    const history = first.output.map(({ parsed_arguments, ...item }) => item);
    const answer = await client.responses.create({ ...asked, input: [...ask(WEATHER), ...history, result] });
    same(answer.output_text, ANSWER);
  },
});

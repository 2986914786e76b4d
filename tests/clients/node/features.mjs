// What the scripts of the Node clients share, as python/features.py does.
import assert from "node:assert/strict";

export const HOST = process.env.SERVER_URL;
export const BASE_URL = `${HOST}/v1`;
export const MODEL = "tiny";
export const HELLO = "Say hello.";
export const SAID = "Hello from Paris.";
export const THOUGHT = "Let me see.";
export const WEATHER = "What is the weather in Paris?";
export const ANSWER = "It is 21 degrees.";
export const AS_JSON = "The weather in Paris as JSON, please.";
export const same = assert.deepEqual;

export async function run(features) {
  for (const [feature, attempt] of Object.entries(features)) {
    let result = "ok";
    try {
      await attempt();
    } catch (error) {
      result = `${error.name}: ${error.message}`.slice(0, 2000);
    }
    console.log(JSON.stringify({ feature, result }));
  }
}

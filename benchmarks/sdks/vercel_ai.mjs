// Vercel's ai with the default model of @ai-sdk/openai, which speaks /v1/responses.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { model, question, report, url } from "./checks.mjs";

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "x" });
const asked = { model: openai(model), prompt: question, maxOutputTokens: 200, maxRetries: 0 };
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.enum(["Oslo", "Rome"]) }),
  execute: async ({ city }) => `It rains in ${city}.`,
});

await report({
  chats: async () => (await generateText(asked)).text,
  streams: async () => {
    let text = "";
    for await (const piece of streamText(asked).textStream) text += piece;
    return text;
  },
  tools: async () => {
    const { toolCalls, toolResults } = await generateText({ ...asked, tools: { weather }, toolChoice: "required" });
    return toolCalls.length && toolResults.length;
  },
  structured: async () => {
    const schema = z.object({ colour: z.enum(["red", "blue"]) });
    return (await generateObject({ ...asked, prompt: "Red or blue?", schema })).object.colour;
  },
  chat_completions: async () => (await generateText({ ...asked, model: openai.chat(model) })).text,
});

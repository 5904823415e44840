// openai for node, by /v1/responses and chat completions.
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { model, question, report, url } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "x", maxRetries: 0 });
const Pick = z.object({ colour: z.enum(["red", "blue"]) });
const asked = { model, input: question, max_output_tokens: 200, temperature: 0 };
const weather = {
  type: "function",
  name: "weather",
  strict: true,
  parameters: {
    type: "object",
    properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  },
};

await report({
  chats: async () => (await client.responses.create(asked)).output_text,
  streams: async () => (await client.responses.stream(asked).finalResponse()).output_text,
  tools: async () => {
    const response = await client.responses.create({ ...asked, tools: [weather], tool_choice: "required" });
    return JSON.parse(response.output.find((item) => item.type === "function_call").arguments).city;
  },
  structured: async () => {
    const text = { format: zodTextFormat(Pick, "pick") };
    return (await client.responses.parse({ ...asked, input: "Red or blue?", text })).output_parsed.colour;
  },
  chat_completions: async () => {
    const messages = [{ role: "user", content: question }];
    return (await client.chat.completions.create({ model, messages, max_tokens: 20 })).choices[0].message.content;
  },
});

// @anthropic-ai/sdk for node.
import Anthropic from "@anthropic-ai/sdk";
import { model, question, report, url } from "./checks.mjs";

const client = new Anthropic({ baseURL: url, apiKey: "x", maxRetries: 0 });
const asked = { model, max_tokens: 200, messages: [{ role: "user", content: question }] };
const city = { type: "object", properties: { city: { type: "string", enum: ["Oslo", "Rome"] } }, required: ["city"] };

await report({
  chats: async () => (await client.messages.create(asked)).content[0].text,
  streams: async () => (await client.messages.stream(asked).finalMessage()).content[0].text,
  tools: async () => {
    const tools = [{ name: "weather", description: "The weather of a city.", input_schema: city }];
    const message = await client.messages.create({ ...asked, tools, tool_choice: { type: "any" } });
    return message.content.find((block) => block.type === "tool_use").input.city;
  },
});

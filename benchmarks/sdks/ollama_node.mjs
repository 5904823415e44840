// The ollama package of npm.
import { Ollama } from "ollama";
import { model, question, report, url } from "./checks.mjs";

const client = new Ollama({ host: url });
const asked = { model, messages: [{ role: "user", content: question }], options: { num_predict: 100, temperature: 0 } };

await report({
  chats: async () => (await client.chat(asked)).message.content,
  streams: async () => {
    let text = "";
    for await (const part of await client.chat({ ...asked, stream: true })) text += part.message.content;
    return text;
  },
  structured: async () => {
    const format = { type: "object", properties: { colour: { enum: ["red", "blue"] } }, required: ["colour"] };
    return JSON.parse((await client.chat({ ...asked, format })).message.content).colour;
  },
  lists: async () => (await client.list()).models[0].model === model,
});

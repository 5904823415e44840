// The server's API: models, and chat answers streamed as server-sent events.

const KEY = "paceline-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

async function call(path, options = {}) {
  const key = apiKey.get();
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new ApiError(answer.status, body.error?.message ?? `the server answered ${answer.status}`);
}

export async function model() {
  const found = await (await call("/v1/models")).json();
  return found.data[0];
}

// Calls onStep(choice) for every step of the engine; resolves to the usage.
export async function chat(body, signal, onStep) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
  const answer = await call("/v1/chat/completions", { method: "POST", body: JSON.stringify(asked), signal });
  let usage = null;
  for await (const event of events(answer.body)) {
    if (event.error) throw new ApiError(500, event.error.message);
    usage = event.usage ?? usage;
    for (const choice of event.choices) if (choice.token_ids?.length) onStep(choice);
  }
  return usage;
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// The page: chat, race, and live figures of speculation.

import { ApiError, apiKey, chat, model } from "./api.js";
import { race } from "./race.js";
import { Tally } from "./tally.js";
import { Painter, appendTokens, byId, element, showFigures } from "./view.js";

const HIGHEST_K = 16;
const messages = [];
let running = null; // AbortController of the answer under way
let served = null;

// -- settings

function settings() {
  const method = byId("method").value;
  const k = byId("k").value;
  const body = { model: served.id, max_tokens: Number(byId("max-tokens").value) };
  body.temperature = Number(byId("temperature").value);
  body.speculation = method === "none" ? "off" : { method, k: k === "auto" ? "auto" : Number(k) };
  return body;
}

async function connect() {
  try {
    served = await model();
  } catch (error) {
    byId("model").textContent = error.message;
    byId("key-row").hidden = !(error instanceof ApiError && error.status === 401);
    return;
  }
  byId("key-row").hidden = !apiKey.get();
  byId("model").textContent = [
    ...[served.id.split("/").pop(), served.device, served.dtype],
    ...(served.captured ? ["prompts and answers are kept"] : []),
  ].join(" · ");
  const methods = ["auto", "none", ...served.methods];
  byId("method").replaceChildren(...methods.map((name) => new Option(name)));
  byId("max-tokens").max = served.max_model_len;
}

function chooseK() {
  const numbers = Array.from({ length: HIGHEST_K }, (_, at) => String(at + 1));
  byId("k").replaceChildren(...["auto", ...numbers].map((name) => new Option(name)));
}

// -- chat

async function answer(text) {
  byId("hint").hidden = true;
  messages.push({ role: "user", content: text });
  const log = byId("log");
  log.append(element("div", "user", text));
  const box = log.appendChild(element("div", "answer"));
  const tally = new Tally();
  let written = "";
  const painter = new Painter((steps) => {
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    for (const choice of steps) appendTokens(box, choice);
    showFigures(tally);
    if (atEnd) log.scrollTop = log.scrollHeight;
  });
  try {
    await chat({ ...settings(), messages }, running.signal, (choice) => {
      tally.add(choice, performance.now());
      written += choice.delta.content ?? "";
      painter.add(choice);
    });
  } catch (error) {
    painter.flush();
    box.append(element("p", error.name === "AbortError" ? "soft" : "error", reason(error)));
  }
  painter.flush();
  if (written) messages.push({ role: "assistant", content: written });
  else messages.pop(); // a turn without an answer would be in the way of the next
}

function reason(error) {
  return error.name === "AbortError" ? "stopped" : error.message;
}

function clearChat() {
  running?.abort();
  messages.length = 0;
  for (const old of byId("log").querySelectorAll(".user, .answer")) old.remove();
  byId("hint").hidden = false;
  showFigures(new Tally());
  byId("prompt").focus();
}

// -- the composer

const racing = () => byId("tab-race").getAttribute("aria-selected") === "true";

async function send() {
  const prompt = byId("prompt");
  const text = prompt.value.trim();
  if (running !== null || !text) return;
  if (served === null) await connect();
  if (served === null) return;
  running = new AbortController();
  byId("send").textContent = "Stop";
  if (racing()) {
    await race({ ...settings(), messages: [{ role: "user", content: text }] }, running.signal).catch((error) => {
      byId("verdict").textContent = reason(error);
    });
  } else {
    prompt.value = "";
    await answer(text);
  }
  running = null;
  nameButton();
}

function nameButton() {
  byId("send").textContent = running !== null ? "Stop" : racing() ? "Race" : "Send";
}

function show(view) {
  for (const name of ["chat", "race"]) {
    const tab = byId(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === view));
    tab.tabIndex = name === view ? 0 : -1;
    byId(name).hidden = name !== view;
  }
  byId("clear").hidden = view === "race";
  nameButton();
}

function toggleView(focus = false) {
  show(racing() ? "chat" : "race");
  if (focus) byId(racing() ? "tab-race" : "tab-chat").focus();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running !== null) running.abort();
  else send();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
byId("clear").addEventListener("click", clearChat);
byId("hint").addEventListener("click", (event) => {
  if (event.target.tagName !== "BUTTON") return;
  byId("prompt").value = event.target.textContent;
  send();
});
for (const name of ["chat", "race"]) {
  byId(`tab-${name}`).addEventListener("click", () => show(name));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    if (["ArrowLeft", "ArrowRight"].includes(event.key)) toggleView(true);
  });
}
document.addEventListener("keydown", (event) => {
  const typing = ["INPUT", "TEXTAREA", "SELECT"].includes(document.activeElement?.tagName);
  if (event.key === "Escape") running?.abort();
  else if (event.altKey && event.key.toLowerCase() === "r") toggleView();
  else if (event.key === "/" && !typing) byId("prompt").focus();
  else return;
  if (event.key !== "Escape") event.preventDefault();
});

// -- theme and key

byId("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  localStorage.setItem("paceline-theme", document.documentElement.dataset.theme);
});
const theme = localStorage.getItem("paceline-theme");
if (theme !== null) document.documentElement.dataset.theme = theme;
byId("key").value = apiKey.get();
byId("key").addEventListener("change", () => {
  apiKey.set(byId("key").value);
  connect();
});

if (matchMedia("(max-width: 60rem)").matches) byId("settings").open = false;
chooseK();
connect();

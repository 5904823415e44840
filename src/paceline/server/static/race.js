// Plain against speculative on one prompt. Each answer is made alone; the speculative one comes first, since lookups
// learn from finished answers, and is replayed at its own speed while the plain one is made.

import { chat } from "./api.js";
import { Tally } from "./tally.js";
import { Painter, appendTokens, byId, showFigures } from "./view.js";

class Lane {
  constructor(id, limit) {
    const root = byId(id);
    this.box = root.querySelector(".answer");
    this.bar = root.querySelector("progress");
    this.figure = root.querySelector("output");
    this.limit = limit;
    this.steps = []; // [milliseconds after the first token, choice]
    this.ids = [];
    this.painter = new Painter((steps) => this.paint(steps));
    this.clear();
  }

  clear() {
    this.tally = new Tally();
    this.box.replaceChildren();
    this.bar.value = 0;
    this.figure.textContent = "";
  }

  paint(steps) {
    for (const choice of steps) appendTokens(this.box, choice);
    this.box.scrollTop = this.box.scrollHeight;
    this.bar.value = steps.at(-1).finish_reason ? 1 : this.tally.tokens / this.limit;
    const speed = this.tally.speed;
    if (speed !== null) this.figure.textContent = `${speed.toFixed(0)} tokens/s · ${this.tally.seconds.toFixed(1)} s`;
  }

  add(choice, now) {
    this.tally.add(choice, now);
    this.painter.add(choice);
  }

  async run(body, signal, onStep) {
    await chat(body, signal, (choice) => {
      const now = performance.now();
      this.add(choice, now);
      this.steps.push([now - this.tally.first.now, choice]);
      this.ids.push(...choice.token_ids);
      onStep(this.tally);
    }).finally(() => this.painter.flush());
  }

  // Shows the recorded steps again, each when it came.
  replay(started, signal) {
    this.clear();
    let next = 0;
    return new Promise((resolve) => {
      const frame = () => {
        if (signal.aborted) return resolve();
        const elapsed = performance.now() - started;
        for (; next < this.steps.length && this.steps[next][0] <= elapsed; next += 1) {
          this.add(this.steps[next][1], this.steps[next][0]);
        }
        if (next < this.steps.length) requestAnimationFrame(frame);
        else resolve(this.painter.flush());
      };
      frame();
    });
  }
}

export async function race(body, signal) {
  const fast = new Lane("lane-fast", body.max_tokens);
  const plain = new Lane("lane-plain", body.max_tokens);
  const say = (text, result = false) => {
    byId("verdict").textContent = text;
    byId("verdict").classList.toggle("result", result);
  };
  const seed = body.temperature > 0 ? { seed: Math.floor(Math.random() * 2 ** 31) } : {};
  const asked = { ...body, ...seed };
  if (asked.speculation === "off") asked.speculation = { method: "auto", k: "auto" };

  say("1 of 2: speculative, alone …");
  const figures = new Painter((tallies) => showFigures(tallies.at(-1)));
  await fast.run(asked, signal, (tally) => figures.add(tally));
  say("2 of 2: plain; the first is replayed beside it …");
  let replayed = null;
  await plain.run({ ...asked, speculation: "off" }, signal, (tally) => {
    replayed ??= fast.replay(tally.first.now, signal);
  });
  await replayed;
  say(verdict(fast, plain), true);
}

function verdict(fast, plain) {
  const same = fast.ids.length === plain.ids.length && fast.ids.every((id, at) => id === plain.ids[at]);
  if (!same) return "The answers differ, which is a fault worth reporting.";
  const count = `the same ${plain.ids.length} tokens`;
  if (plain.tally.seconds === 0 || fast.tally.seconds === 0) return `${count}, too few to time`;
  const times = plain.tally.seconds / fast.tally.seconds;
  const saved = plain.tally.seconds - fast.tally.seconds;
  const seconds = `${Math.abs(saved).toFixed(1)} s ${saved < 0 ? "lost" : "saved"}`;
  return `${times.toFixed(2)}× the speed of plain decoding, ${seconds} · ${count}, one by one`;
}

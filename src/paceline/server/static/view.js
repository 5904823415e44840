// Tokens and figures on the page.

const STEPS = 48;
const POSITIONS = 8; // shown; few drafts go deeper
const SVG = "http://www.w3.org/2000/svg";
const KINDS = { drafted: "accepted draft", recovered: "recovered", bonus: "bonus" };

export const byId = (id) => document.getElementById(id);

export function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

// Steps may come faster than the screen shows them: `paint` is called with all that came since the last frame.
export class Painter {
  constructor(paint) {
    this.paint = paint;
    this.steps = [];
  }

  add(choice) {
    this.steps.push(choice);
    if (this.steps.length === 1) requestAnimationFrame(() => this.flush());
  }

  flush() {
    if (this.steps.length) this.paint(this.steps.splice(0));
  }
}

export function appendTokens(box, { token_texts: texts, token_kinds: kinds, draft }) {
  for (const [at, text] of texts.entries()) {
    const token = element("span", draft ? kinds[at] : "plain", text);
    token.title = draft ? `${KINDS[kinds[at]]} · ${draft.method}, ${draft.nodes} nodes` : "plain step";
    box.append(token);
  }
}

export function showFigures(tally) {
  const put = (id, value, digits, unit = "") => {
    byId(id).textContent = value === null ? "–" : value.toFixed(digits) + unit;
  };
  put("tau", tally.tau, 2);
  put("speed", tally.speed, 0);
  put("rate", tally.rate === null ? null : 100 * tally.rate, 0, " %");
  put("nodes", tally.nodesPerDraft, 1);
  showPositions(tally);
  showSteps(tally);
  byId("methods").textContent = [...tally.methods].map(([name, drafts]) => `${name}: ${drafts} drafts`).join(" · ");
}

function showPositions(tally) {
  const box = byId("positions");
  if (!tally.reached.length) return box.replaceChildren(element("p", "soft", "No drafts yet."));
  const rows = tally.reached.slice(0, POSITIONS).map((reached, at) => {
    const share = tally.held[at] / reached;
    const row = element("div", "bar");
    row.title = `${tally.held[at]} of ${reached} drafts`;
    const track = element("span", "track");
    track.append(element("i", ""));
    track.firstChild.style.width = `${100 * share}%`;
    row.append(element("span", "", String(at + 1)), track, element("span", "", `${Math.round(100 * share)} %`));
    return row;
  });
  box.replaceChildren(...rows);
}

// One column for each step: its nodes, and the accepted ones of them from below.
function showSteps(tally) {
  const steps = tally.steps.slice(-STEPS);
  const highest = Math.max(4, ...steps.map(([nodes]) => nodes));
  const bars = steps.flatMap(([nodes, accepted], at) =>
    [["nodes", nodes], ["held", accepted]].filter(([, size]) => size).map(([name, size]) => {
      const bar = document.createElementNS(SVG, "rect");
      const height = (44 * size) / highest;
      for (const [key, value] of Object.entries({ class: name, x: 4 * at, y: 48 - height, width: 3, height })) {
        bar.setAttribute(key, value);
      }
      return bar;
    }),
  );
  byId("steps").replaceChildren(...bars);
}

// Figures of an answer, counted step by step as the engine counts them.

export class Tally {
  constructor() {
    this.tokens = this.passes = this.drafts = this.nodes = this.accepted = 0;
    this.reached = []; // drafts that were so deep, by position
    this.held = []; // drafts accepted so deep
    this.steps = []; // [nodes, accepted]
    this.methods = new Map(); // drafts by method
    this.first = this.last = null;
  }

  add({ token_ids: tokens, token_kinds: kinds, draft }, now) {
    this.first ??= { now, tokens: tokens.length };
    this.last = now;
    this.tokens += tokens.length;
    this.passes += 1;
    const accepted = kinds.filter((kind) => kind === "drafted").length;
    this.steps.push([draft?.nodes ?? 0, accepted]);
    if (!draft) return;
    this.drafts += 1;
    this.nodes += draft.nodes;
    this.accepted += accepted;
    this.methods.set(draft.method, (this.methods.get(draft.method) ?? 0) + 1);
    for (let at = 0; at < draft.depth; at += 1) {
      this.reached[at] = (this.reached[at] ?? 0) + 1;
      this.held[at] = (this.held[at] ?? 0) + (at < accepted ? 1 : 0);
    }
  }

  get tau() {
    return this.passes ? this.tokens / this.passes : null;
  }

  get rate() {
    return this.nodes ? this.accepted / this.nodes : null;
  }

  get nodesPerDraft() {
    return this.drafts ? this.nodes / this.drafts : null;
  }

  // From the first token on: reading the prompt is not decoding.
  get speed() {
    const seconds = this.seconds;
    return seconds > 0 ? (this.tokens - this.first.tokens) / seconds : null;
  }

  get seconds() {
    return this.first === null ? 0 : (this.last - this.first.now) / 1000;
  }
}

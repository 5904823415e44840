"""`paceline demo`: the same prompt answered speculatively and plainly, and whether the answers are equal.

Each prompt is answered speculatively first: the suffix drafter learns from finished answers, and copying an answer it
has already seen would be no speed-up. No prefix is shared, both are greedy, and tokens are compared, not text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.bench.intervals import LOOP, loops
from paceline.cli import flags
from paceline.cli.flags import RunOptions, argument, flag, shared_fields, with_options
from paceline.cli.generate import load_llm, messages, read_prompt
from paceline.cli.output import Tally, interrupted, method_words, print_json, rate_words
from paceline.config import AUTO, NONE
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.llm import LLM

DRAFTED = 0  # TokenKind.DRAFTED, without its import of torch
NOTICEABLE = 1.03  # speed-up; below it the demo says that nothing was gained
BUSY = 1.1  # share of τ: a pass commits τ tokens, so a higher speed-up is an error of timing
ACCEPTED_STYLE = "bold green"

# A chat answer, where little can be guessed, and two tasks that repeat what they were given.
CHAT = "Give me three tips for staying focused while working from home."

CODE = """Remove the line that prints from this function and repeat the rest of it word for word.

```python
def read_settings(path):
    settings = {}
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, value = line.split("=", 1)
            settings[key.strip()] = value.strip()
    print("settings read:", len(settings))
    return settings
```"""

QUOTE = """Repeat the following paragraph word for word.

A paceline is a group of cyclists who ride closely behind one another. The rider in front breaks the wind, and \
everyone behind saves a good part of the effort. After a minute or two the leader pulls to the side, drifts to \
the back and rests, and the next rider takes over. Nobody goes faster than they could have gone alone for a \
moment, yet the whole group arrives sooner than any of them would have by themselves."""

PROMPTS = {"chat": CHAT, "code": CODE, "quote": QUOTE}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    prompt: str | None = argument(
        None, "Ask this instead of the three built-in prompts; - reads it from stdin.", "PROMPT"
    )
    model: flags.ModelFlag = "smollm2"
    method: flags.Method = AUTO
    k: flags.K = AUTO
    draft_model: flags.DraftModel = None
    max_tokens: int = flag(160, "Answers end after this many tokens.")
    threads: flags.Threads = None
    device: flags.Device = "auto"
    json: flags.Json = False


@with_options
def demo(*, options: DemoOptions) -> int:
    """Answer speculatively and plainly, side by side; exit code 1 if a single token differs."""
    if options.method == NONE:
        raise InvalidParameter("method", "the demo compares a drafting method with plain decoding; name another")
    whole = RunOptions(**shared_fields(options, RunOptions))
    whole.sampling_params()  # refuses a wrong max_tokens before the model is loaded
    arguments = {**whole.speculation_arguments(), "prefix_caching": False}
    prompts = PROMPTS if options.prompt is None else {"yours": read_prompt(options.prompt)}
    try:
        rounds = show(load_llm(whole, arguments), prompts, options.max_tokens, as_json=options.json)
    except KeyboardInterrupt:
        return interrupted("interrupted", as_json=options.json)
    return 0 if all(one.identical for one in rounds) else 1


def show(llm: LLM, prompts: Mapping[str, str], max_tokens: int, *, as_json: bool) -> list[DemoRound]:
    screen = DemoScreen(llm, quiet=as_json)
    screen.title(llm)
    quiet = DemoScreen(llm, quiet=True)
    run(llm, "Count to ten.", 8, speculation=NONE, screen=quiet)  # warm-up: a process's first steps are slow
    rounds = [compare(llm, name, text, max_tokens, screen) for name, text in prompts.items()]
    screen.summary(rounds)
    if as_json:
        print_json({"model": llm.name, "method": llm.method, "rounds": [one.as_dict() for one in rounds]})
    return rounds


def compare(llm: LLM, name: str, prompt: str, max_tokens: int, screen: DemoScreen) -> DemoRound:
    screen.prompt(name, prompt)
    screen.heading("speculatively")
    speculative = run(llm, prompt, max_tokens, speculation=None, screen=screen)
    screen.heading("plainly")
    plain = run(llm, prompt, max_tokens, speculation=NONE, screen=screen)
    result = DemoRound(name, prompt, speculative, plain)
    screen.verdict(result)
    return result


def run(llm: LLM, prompt: str, max_tokens: int, *, speculation: str | None, screen: DemoScreen) -> Tally:
    from paceline.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, speculation=speculation)
    tally = Tally(llm)
    try:
        with closing(llm.stream(messages(None, prompt), params)) as chunks:
            for chunk in chunks:
                tally.add(chunk)
                screen.tokens(chunk.token_ids, chunk.kinds)
    finally:
        screen.end()
    return tally


@dataclass(frozen=True)
class DemoRound:
    name: str
    prompt: str
    speculative: Tally
    plain: Tally

    @property
    def first_difference(self) -> int | None:
        """Index of the first token at which the answers differ; None: they are equal."""
        drafted, plain = token_ids(self.speculative), token_ids(self.plain)
        if drafted == plain:
            return None
        agree = [a == b for a, b in zip(drafted, plain, strict=False)]
        return agree.index(False) if False in agree else len(agree)

    @property
    def identical(self) -> bool:
        return self.first_difference is None

    @property
    def speedup(self) -> float | None:
        fast, slow = self.speculative.tokens_per_second, self.plain.tokens_per_second
        return fast / slow if fast and slow else None

    @property
    def loops(self) -> bool:
        return loops(token_ids(self.speculative))

    @property
    def method(self) -> str:
        return method_words(self.speculative.speculation) or "off"

    def as_dict(self) -> dict[str, Any]:
        stats = self.speculative.speculation
        return {
            "name": self.name,
            "prompt": self.prompt,
            "text": self.speculative.text,
            "drafted_by": dict(stats.drafts_by_method),
            "speculative": timing(self.speculative),
            "plain": timing(self.plain),
            "speedup": self.speedup,
            "acceptance_rate": stats.acceptance_rate,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "identical": self.identical,
            "first_difference": self.first_difference,
            "loops": self.loops,
        }


def token_ids(tally: Tally) -> list[int]:
    assert tally.output is not None, "the request is not finished"
    return list(tally.output.outputs[0].token_ids)


def timing(tally: Tally) -> dict[str, Any]:
    return {
        "completion_tokens": tally.completion_tokens,
        "ttft_s": tally.ttft_s,
        "decode_s": tally.decode_s,
        "tokens_per_second": tally.tokens_per_second,
    }


class DemoScreen:
    """Output of the demo: coloured on a terminal, plain elsewhere, none where it is quiet."""

    def __init__(self, llm: LLM, *, quiet: bool) -> None:
        from rich.console import Console

        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # characters the encoding lacks become question marks
        self._console: Console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=quiet)
        self._decoder = llm.tokenizer.incremental_decoder(True)
        self._at_line_start = True

    def title(self, llm: LLM) -> None:
        self._print(f"{llm.name}, greedy; accepted drafts in ", end="")
        self._print("green", ACCEPTED_STYLE)

    def prompt(self, name: str, text: str) -> None:
        self._print(f"\n── {name} ──", "bold")
        self._print(text, "dim")

    def heading(self, how: str) -> None:
        self._print(f"\n{how}:", "bold")

    def tokens(self, tokens: Sequence[int], kinds: Sequence[int]) -> None:
        for token, kind in zip(tokens, kinds, strict=True):
            self._piece(self._decoder.push(token), ACCEPTED_STYLE if kind == DRAFTED else "")

    def end(self) -> None:
        self._piece(self._decoder.flush(), "")
        if not self._at_line_start:
            self._print("")
        self._at_line_start = True

    def verdict(self, one: DemoRound) -> None:
        self._print("")
        for line in verdict_lines(one):
            self._print(line)

    def summary(self, rounds: Sequence[DemoRound]) -> None:
        from paceline.cli.table import print_table

        if not self._console.quiet:
            headings = ("prompt", "plain", "drafted", "speed-up", "accepted", "τ", "by", "identical")
            print_table(None, headings, [summary_row(one) for one in rounds], left="by")
            self._print("plain, drafted: tokens per second")

    def _piece(self, text: str, style: str) -> None:
        if text:
            self._at_line_start = text.endswith("\n")
            self._print(text, style, end="")

    def _print(self, text: str, style: str = "", end: str = "\n") -> None:
        self._console.print(text, style=style, end=end)
        self._console.file.flush()


def verdict_lines(one: DemoRound) -> list[str]:
    stats = one.speculative.speculation
    rates = f"plain {rate_words(one.plain.tokens_per_second)} · speculative"
    words = [f"{rates} {rate_words(one.speculative.tokens_per_second)}", times(one.speedup)]
    if stats.acceptance_rate is not None:
        tau = stats.mean_acceptance_length or 1.0
        words += [f"{one.method}: {stats.acceptance_rate:.0%} of drafts accepted", f"τ {tau:.1f}"]
    same = "yes" if one.identical else f"NO, they differ at token {one.first_difference}"
    lines = [" · ".join(words), f"identical output: {same}"]
    if one.speedup is not None and one.speedup < NOTICEABLE:
        why = "drafts were made and did not pay" if stats.num_drafts else "there was nothing worth drafting"
        lines.append(f"no speed-up here: {why}")
    if one.speedup is not None and one.speedup > BUSY * (stats.mean_acceptance_length or 1.0):
        lines.append("the machine was busy with something else: no speed-up above τ comes from speculation")
    if one.loops:
        lines.append(f"the answer loops (the same {LOOP} tokens twice), which flatters lookup")
    return lines


def summary_row(one: DemoRound) -> list[str]:
    stats = one.speculative.speculation
    rates = [tally.tokens_per_second for tally in (one.plain, one.speculative)]
    return [
        one.name + (" (loops)" if one.loops else ""),
        *("n/a" if rate is None else f"{rate:.1f}" for rate in rates),
        times(one.speedup),
        "none" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.0%}",
        f"{stats.mean_acceptance_length or 1.0:.2f}",
        one.method,
        "yes" if one.identical else "NO",
    ]


def times(factor: float | None) -> str:
    return "n/a" if factor is None else f"{factor:.2f}x"

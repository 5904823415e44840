"""Tokens to train on, written by the target itself through the engine: it answers prompts, and writes prompts too.

A third each of the answers is greedy, at temperature 0.7 and at 1. Shards are written one by one, so a run that is cut
short keeps them. Tokens stay tokens: no text is decoded and encoded again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np
import torch

from paceline.config import NONE
from paceline.errors import InvalidParameter, PacelineError
from paceline.llm import LLM
from paceline.models.load.hub import resolve
from paceline.models.load.loader import load_config
from paceline.sampling_params import SamplingParams
from paceline.text.tokenizer import Tokenizer
from paceline.training.data.examples import Message, encoded, read_examples
from paceline.training.data.filters import loop_ends, without_loops
from paceline.training.data.sources import SYNTHETIC
from paceline.training.data.store import Sequences, Source, TokenStore, token_dtype

TEMPERATURES = (0.0, 0.7, 1.0)
SHARD = 16_384  # answers of one shard
PROMPT_TOKENS = 160  # tokens; longest prompt that the target may write
LEAST_PROMPT = 4  # tokens; shortest prompt that is used
LEAST_ROOM = 16  # tokens left for an answer behind the longest prompt
LEAST_TRIED = 256  # prompts; from then on, fewer than 1 % usable ones end the run
MARK = "\ue000"  # the user's text in a rendered chat; no tokenizer merges a private-use character with others
Report = Callable[[str], None]
Tokens = tuple[int, ...]


def open_generator(model: str, device: str, rows: int | None = None) -> LLM:
    """Open an engine for throughput: many rows, large passes, no drafting."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    rows = rows or (512 if on_gpu else 16)
    return LLM(
        model,
        device=device,
        method=NONE,
        max_num_seqs=rows,
        max_num_batched_tokens=max(8 * rows, 256),
        max_model_len=min(1024, load_config(resolve(model)).max_positions),
        gpu_memory_fraction=0.5,
    )


def chat_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens before and behind the user's text in a chat of one message, up to where the answer begins."""
    if not tokenizer.has_chat_template:
        raise PacelineError("the model has no chat template, so it cannot write prompts; give --data FILE with text")
    opening, mark, closing = tokenizer.render_chat([{"role": "user", "content": MARK}]).partition(MARK)
    if not mark:
        raise PacelineError("the model's chat template does not show the user's text; give --data FILE with text")
    first, second = tokenizer.encode_each([opening, closing], add_special_tokens=False)
    return first, second


def write_prompts(llm: LLM, count: int, known: Collection[Tokens] = ()) -> list[Tokens]:
    """Have the target write prompts after the opening of a user's turn: complete, distinct, without loops."""
    opening, _ = chat_frame(llm.tokenizer)
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=PROMPT_TOKENS)
    answers = llm.generate([opening] * count, params)
    eos = set(llm.config.eos_token_ids)
    texts = [
        tuple(answer.outputs[0].token_ids[:-1])
        for answer in answers
        if answer.outputs[0].finish_reason == "stop" and answer.outputs[0].token_ids[-1] in eos
    ]
    added = llm.tokenizer.backend.get_added_tokens_decoder()
    specials = {token for token, text in added.items() if text.special} | eos
    prompts = [text for text in texts if len(text) >= LEAST_PROMPT and not specials & set(text)]
    prompts = [text for text in dict.fromkeys(prompts) if text not in known]
    if not prompts:
        return []
    sequences = Sequences.of([((), text) for text in prompts], llm.config.vocab_size)
    loops = loop_ends(sequences, size=8) < sequences.lengths
    return [text for text, loop in zip(prompts, loops.tolist(), strict=True) if not loop]


def answer(llm: LLM, prompts: SequenceOf[SequenceOf[int]], length: int, source: int, *, turn: int = 0) -> Sequences:
    """Have the target answer token prompts, to EOS or a whole of `length` tokens; `turn` shifts the temperatures."""
    fitting = [list(prompt) for prompt in prompts if len(prompt) <= length - LEAST_ROOM]
    params = {
        (kind, room): _sampling(kind, room)
        for kind in range(len(TEMPERATURES))
        for room in {length - len(prompt) for prompt in fitting}
    }
    wanted = [params[(at + turn) % len(TEMPERATURES), length - len(prompt)] for at, prompt in enumerate(fitting)]
    outputs = llm.generate(fitting, wanted) if fitting else []
    written = [one.outputs[0].token_ids for one in outputs]
    return without_loops(Sequences.of(list(zip(fitting, written, strict=True)), llm.config.vocab_size, source))


def _sampling(kind: int, room: int) -> SamplingParams:
    return SamplingParams(temperature=TEMPERATURES[kind], top_p=1.0, top_k=0, max_tokens=room)


def collect(
    store: TokenStore,
    sources: SequenceOf[Source],
    model: str,
    *,
    data: SequenceOf[Path],
    regenerate: bool,
    synthesise: int,
    length: int,
    device: str,
    report: Report,
) -> None:
    """Fill the store with the sources that it does not hold yet."""
    if store.is_complete(sources):
        return
    path = resolve(model)
    tokenizer, eos = Tokenizer.from_path(path), load_config(path).eos_token_ids
    for source in sources:
        store.accept(source)
    for file in () if regenerate else data:
        if not store.has(file.stem):
            store.add(file.stem, read_file(file, tokenizer, eos, store.vocab_size, store.source(file.stem)))
    if synthesise:
        chat_frame(tokenizer)  # refuses a model without a chat template before an engine is started
    if synthesise or regenerate:
        with open_generator(model, device) as llm:
            maker = Maker(llm, store, length, report)
            for file in data if regenerate else ():
                maker.regenerate(file)
            if synthesise:
                maker.synthesise(synthesise)
    store.complete(sources)


class Maker:
    """A writer of answers into a store, shard by shard."""

    def __init__(self, llm: LLM, store: TokenStore, length: int, report: Report = print) -> None:
        self.llm, self.store, self.length, self.report = llm, store, length, report
        self._began = time.perf_counter()
        self._tokens = 0

    def synthesise(self, count: int, *, deadline: float = float("inf"), answers: int = 2) -> int:
        """Have the target write `count` prompts and answer each `answers` times at different temperatures.

        Prompts of an earlier run count. Ends at `deadline`, a time of `perf_counter`. Returns the number of prompts."""
        frame = chat_frame(self.llm.tokenizer)
        prompts = self._written(frame)
        before, room = len(prompts), self.length - LEAST_ROOM - len(frame[0]) - len(frame[1])
        tried, pace = 0, 0.0  # pace: seconds for each prompt tried, its answers included
        while len(prompts) < count:
            began = time.perf_counter()
            fits = int((deadline - began) / pace) if pace and deadline < float("inf") else SHARD
            wanted = min(max(count - len(prompts), 16), SHARD // answers, fits)
            if wanted < 16 or began >= deadline:
                break
            written = [one for one in write_prompts(self.llm, wanted, prompts) if len(one) <= room]
            written = written[: count - len(prompts)]
            tried, usable = tried + wanted, len(prompts) - before + len(written)
            if tried >= LEAST_TRIED and usable < tried // 100:
                raise PacelineError(
                    f"of {tried} prompts that the model wrote {usable} were usable; give --data FILE with prompts"
                )
            number = next(free for free in itertools.count() if not self.store.has(f"{SYNTHETIC}-{free:08d}"))
            self._answered([[*frame[0], *one, *frame[1]] for one in written], SYNTHETIC, answers, number)
            prompts.update(written)
            pace = (time.perf_counter() - began) / wanted
        return len(prompts)

    def _written(self, frame: tuple[list[int], list[int]]) -> set[Tokens]:
        """Return the prompts in the store, without their frame."""
        names = self.store.shards_of(SYNTHETIC, generated=True)
        stored = self.store.read(names) if names else ()
        ends = [(tokens, int(answer.argmax()) - len(frame[1])) for tokens, answer in stored]
        return {tuple(tokens[len(frame[0]) : end].tolist()) for tokens, end in ends}

    def answer_prompts(
        self, prompts: SequenceOf[SequenceOf[int]], name: str, *, answers: int = 3, deadline: float = float("inf")
    ) -> None:
        size = max(SHARD // answers, 1)
        for start in range(0, len(prompts), size):
            if time.perf_counter() >= deadline:
                self.report(f"{name}: {start} of {len(prompts)} prompts answered in the time given")
                return
            self._answered(prompts[start : start + size], name, answers, start)

    def _answered(self, prompts: SequenceOf[SequenceOf[int]], name: str, answers: int, start: int) -> None:
        shard = f"{name}-{start:08d}"
        if not prompts or self.store.has(shard):
            return
        repeated = [prompt for prompt in prompts for _ in range(answers)]
        sequences = answer(self.llm, repeated, self.length, self.store.source(name), turn=start)
        if not len(sequences):
            self.report(f"{name}: none of {len(prompts)} prompts leaves room for an answer in {self.length} tokens")
            return
        self.store.add(shard, sequences)
        self._tokens += int(sequences.answer.sum())
        seconds = time.perf_counter() - self._began
        self.report(
            f"{shard}: {len(sequences):,} answers, {self._tokens:,} answer tokens kept, "
            f"{self._tokens / seconds:,.0f} a second"
        )

    def regenerate(self, path: Path) -> None:
        """Have the target answer the first turn of every example of a file, once."""
        tokenizer, turns = self.llm.tokenizer, []
        for example in read_examples(path):
            if example.text:
                raise InvalidParameter("data", f"{example.origin} is text without a prompt; leave --regenerate out")
            turns.append(example.prompts)
        first = [messages[: _first_turn(messages)] for messages in turns]
        texts = [tokenizer.render_chat(messages) for messages in first]
        self.answer_prompts(tokenizer.encode_each(texts, add_special_tokens=False), path.stem, answers=1)


def _first_turn(messages: SequenceOf[Message]) -> int:
    """Return where the first user's turn ends: a system message may stand before it."""
    roles = [message["role"] for message in messages]
    return roles.index("user") + 1 if "user" in roles else len(roles)


def read_file(path: Path, tokenizer: Tokenizer, eos: tuple[int, ...], vocab_size: int, source: int) -> Sequences:
    """Return the user's own answers, unchanged."""
    examples = read_examples(path)
    missing = next((example for example in examples if not example.answered), None)
    if missing is not None:
        raise InvalidParameter("data", f"{missing.origin} has no answer; add --regenerate, and the target answers it")
    sequences = [one for example in examples for one in encoded(example, tokenizer, eos)]
    return Sequences(
        np.array([token for tokens, _ in sequences for token in tokens], dtype=token_dtype(vocab_size)),
        np.array([one for _, answer in sequences for one in answer], dtype=bool),
        np.cumsum([len(tokens) for tokens, _ in sequences]),
        np.full(len(sequences), source, np.uint8),
    )


def draft_vocabulary(
    sequences: Sequences, size: int, vocab_size: int, always: tuple[int, ...]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the most frequent tokens of the answers, ascending; `always` are among them."""
    if size >= vocab_size:
        return np.arange(vocab_size)
    counts = np.bincount(sequences.tokens[sequences.answer].astype(np.int64), minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    return np.sort(np.argsort(-counts, kind="stable")[:size])

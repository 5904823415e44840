"""One answer being generated. A sequence has no phases: it has tokens, of which a number are computed.

`tokens[:num_computed]` have their K/V in the cache; a decoding sequence has exactly one token left to compute, the
last. The scheduler owns `num_computed`, `blocks` and `status`; all other code only reads them.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
from array import array
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from paceline.outputs import SpeculationStats
from paceline.sampling_params import SamplingParams

TokenLogprobs = dict[int, tuple[float, int]]  # token -> logprob, rank

if TYPE_CHECKING:
    from paceline.text.grammar import Matcher


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    def __init__(
        self,
        request_id: str,
        prompt: SequenceOf[int],
        params: SamplingParams,
        *,
        index: int = 0,
        max_len: int,
        bad_words: SequenceOf[SequenceOf[int]] = (),
        eos: frozenset[int] = frozenset(),
        wait_group: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.wait_group = (
            request_id if wait_group is None else wait_group
        )  # answers that their caller waits for together
        self.index = index  # of the request's n answers
        self.key = f"{request_id}/{index}"
        self.params = params
        self.tokens: list[int] = list(prompt)
        self.num_prompt = len(self.tokens)
        self.max_len = max_len  # upper bound on its tokens, the prompt included
        self.ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)  # tokens that end it
        self.bad_words = tuple(tuple(word) for word in bad_words)  # as token ids
        self._edits = bool(params.penalised or bad_words or params.structured_outputs)
        self.matcher: Matcher | None = None  # of its grammar
        self.sampled = not params.greedy
        self.seed = params.sub_seed(index)
        self.noise_key = secrets.randbits(63) if self.seed is None else self.seed  # key of its coins

        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None  # the reason, where finish_reason is "error"
        self.num_computed = 0
        self.num_cached = 0  # tokens whose blocks were found in the prefix cache: read, never written
        self.blocks: list[int] = []
        self.req_index = -1  # the row of the block manager's tables that holds the same ids; -1: none
        self.num_cached_prompt = 0  # prompt tokens found in the cache when first admitted
        self.num_preemptions = 0
        self.text = ""  # visible output, decoded where the request has stop strings
        self.stats = SpeculationStats()
        # Per output token: token id -> (logprob, rank) of the chosen token and of the most likely ones.
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        # The same of each prompt token but the first, as far as they are computed; the first answer has those of all n.
        self.prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None or index else []

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def decoding(self) -> bool:
        """Only the last token is left to compute, and it is output: a draft may follow it."""
        return self.num_uncomputed == 1 and self.num_output > 0

    @property
    def looks_back(self) -> bool:
        """The next token's distribution depends on earlier tokens in ways that only the host computes."""
        return self._edits or len(self.tokens) - self.num_prompt < self.params.min_tokens

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Its prompt has to be computed, also where the cache holds it."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.max_len - len(self.tokens)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED


def block_hash(parent: bytes, tokens: SequenceOf[int]) -> bytes:
    """Identity of a cache block: its tokens and all before them. Cryptographic: a collision is a wrong answer."""
    digest = hashlib.blake2b(parent, digest_size=16)
    digest.update(array("i", tokens).tobytes())
    return digest.digest()

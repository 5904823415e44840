"""A sequence: one answer that is generated. It has no phases, only tokens, of which a number are computed.

`tokens[:num_computed]` have their K/V in the cache; a decoding sequence has exactly one token left to compute, the
last. Scheduler and committer write `num_computed`, `blocks` and `status`; all other code only reads them.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
from array import array
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, NamedTuple

from paceline.outputs import SpeculationStats
from paceline.sampling_params import SamplingParams

TokenLogprobs = dict[int, tuple[float, int]]  # token -> logprob, rank

if TYPE_CHECKING:
    from paceline.text.grammar import Matcher


def digest_of(secret: str) -> str:
    """Return what stands for a salt, or a key without a name, in the name of a domain."""
    return hashlib.blake2b(secret.encode(errors="surrogatepass"), digest_size=12).hexdigest()


class Owner(NamedTuple):
    """Whose request it is. Requests of one `domain` share what earlier ones left behind: blocks of prompts, past
    answers. Requests of one `client` share their turns with those of other clients."""

    domain: str = ""
    client: str = ""
    lasts: bool = True  # False: no later request has this domain

    def narrowed(self, salt: str | None) -> Owner:
        """Return the owner of requests with this `cache_salt`; None: without one. A domain's name is stored, a salt is
        not."""
        return self if salt is None else self._replace(domain=f"{self.domain} {digest_of(salt)}")


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
        owner: Owner = Owner(),  # noqa: B008  (immutable)
    ) -> None:
        self.request_id, self.owner = request_id, owner
        # Answers of one wait group are waited for together by their caller.
        self.wait_group = request_id if wait_group is None else wait_group
        self.index = index  # index among the request's n answers
        self.key = f"{request_id}/{index}"
        self.params = params
        self.tokens: list[int] = list(prompt)
        self.num_prompt = len(self.tokens)
        self.max_len = max_len  # most tokens, the prompt included
        self.ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)  # tokens that end it
        self.bad_words = tuple(tuple(word) for word in bad_words)  # token ids of each
        self._edits = bool(params.penalised or bad_words or params.structured_outputs)
        self.matcher: Matcher | None = None  # matcher of the request's grammar
        self.sampled = not params.greedy
        self.seed = params.sub_seed(index)
        self.noise_key = secrets.randbits(63) if self.seed is None else self.seed  # key of the draws

        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None  # the reason, where finish_reason is "error"
        self.num_computed = 0
        self.num_cached = 0  # tokens in blocks of the prefix cache, which are read and never written
        self.blocks: list[int] = []
        self.req_index = -1  # row of the block manager's tables that has the block ids; -1: none
        self.num_cached_prompt = 0  # prompt tokens found in the cache when first admitted
        self.num_preemptions = 0
        self.tag = 0.0  # place among the sequences of its client (`core.fair_queue`)
        self.text = ""  # visible output, decoded where the request has stop strings
        self.stats = SpeculationStats()
        # Per output token: token id -> (logprob, rank) of the chosen token and of the most likely ones.
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        # Per computed prompt token but the first; of n answers the first one has them.
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
        """Return whether only the last token is left to compute, and is an output token: a draft may follow it."""
        return self.num_uncomputed == 1 and self.num_output > 0

    @property
    def looks_back(self) -> bool:
        """Return whether earlier tokens change the next one's distribution in a way that only the host computes."""
        return self._edits or len(self.tokens) - self.num_prompt < self.params.min_tokens

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Return whether the prompt has to be computed, also where the cache holds it."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.max_len - len(self.tokens)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED


def root_hash(domain: str) -> bytes:
    """Return the parent of a domain's first blocks: equal tokens of two domains have different hashes."""
    return hashlib.blake2b(domain.encode(), digest_size=16, person=b"paceline domain").digest()


def block_hash(parent: bytes, tokens: SequenceOf[int]) -> bytes:
    """Return the identity of a cache block: its domain, its tokens and all before them. Cryptographic: a collision
    would be a wrong answer, or a leak from another domain."""
    digest = hashlib.blake2b(parent, digest_size=16)
    digest.update(array("i", tokens).tobytes())
    return digest.digest()

"""A client tries to read what another one sent: by which of its tokens were drafted, and by what was cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attack.conftest import Start, complete

K = 3
SECRET, KNOWN = "839201", 3  # a code in an answer, and the digits of it that the attacker knows
SAYS = "The code of the safe is "
STREAM = {"stream": True, "return_token_ids": True}
LONG_PROMPT = "One two three four five six seven eight nine ten. " * 12
Ask = Callable[[dict[str, Any]], dict[str, Any]]


def learn(ask: Ask) -> list[set[str]]:
    """Force each digit behind the known ones, the right one first; return the digits that came by a draft, by place.

    The attacker's own answers hold no digit before it is forced, so they draft none of these. With K nodes a
    draft ends with the digit: the token behind an accepted draft is no drafted one.
    """
    found, known = [], SECRET[:KNOWN]
    for right in SECRET[KNOWN:]:
        drafted = set()
        for digit in sorted("0123456789", key=lambda each: each != right):
            body = {"prompt": "x", "structured_outputs": {"regex": SAYS + known + digit}}
            said = ask({**body, "max_tokens": 40, "speculation": {"method": "suffix", "k": K}, **STREAM})["tokens"]
            assert digit in [text for text, _ in said]
            if [kind for text, kind in said if text == digit][-1] == "drafted":
                drafted.add(digit)
        found.append(drafted)
        known += right
    return found


def tell(ask: Ask) -> None:
    ask({"prompt": "Which code?", "max_tokens": 40, "structured_outputs": {"regex": SAYS + SECRET}})


def cached(ask: Ask) -> int:
    answer = ask({"prompt": LONG_PROMPT, "max_tokens": 1})
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def check_apart(one: Ask, other: Ask) -> None:
    """The attack succeeds from within the domain, else it proves nothing; from another one it learns nothing."""
    tell(one)
    assert learn(other) == [set()] * (len(SECRET) - KNOWN)
    assert learn(one)[0] == {SECRET[KNOWN]}
    assert (cached(one), cached(other)) == (0, 0)
    assert cached(one) >= 64
    assert cached(other) >= 64


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("alice key-a\nbob key-b\nbob key-c\n")
    return file


def test_another_key_and_another_salt_learn_nothing(start: Start, keys: Path) -> None:
    server = start("--api-key-file", str(keys))
    check_apart(lambda body: complete(server, body, "key-a"), lambda body: complete(server, body, "key-b"))
    assert cached(lambda body: complete(server, body, "key-c")) >= 64, "another key of bob's"
    salted: list[Ask] = [lambda body, s=salt: complete(server, {**body, "cache_salt": s}, "key-a") for salt in "xy"]
    check_apart(*salted)


def test_without_keys_on_a_network_each_request_is_alone_but_for_a_salt(start: Start) -> None:
    server = start("--host", "0.0.0.0")
    server.url = server.url.replace("0.0.0.0", "127.0.0.1")
    tell(lambda body: complete(server, body))
    assert learn(lambda body: complete(server, body)) == [set()] * (len(SECRET) - KNOWN)
    assert [cached(lambda body: complete(server, body)) for _ in range(2)] == [0, 0]
    mine: Ask = lambda body: complete(server, {**body, "cache_salt": "mine"})  # noqa: E731
    assert [cached(mine) > 0 for _ in range(2)] == [False, True]


def test_caches_are_shared_or_off_where_the_owner_says_so(start: Start, keys: Path) -> None:
    shared = start("--api-key-file", str(keys), "--share-caches")
    tell(lambda body: complete(shared, body, "key-a"))
    assert learn(lambda body: complete(shared, body, "key-b"))[0] == {SECRET[KNOWN]}
    assert [cached(lambda body, k=key: complete(shared, body, k)) > 0 for key in ("key-a", "key-b")] == [False, True]
    bare = start("--no-prefix-caching", "--no-suffix-store")
    tell(lambda body: complete(bare, body))
    assert learn(lambda body: complete(bare, body)) == [set()] * (len(SECRET) - KNOWN)
    assert [cached(lambda body: complete(bare, body)) for _ in range(2)] == [0, 0]

"""Requests are spread over replicas by how their prompts begin."""

from __future__ import annotations

from paceline.server.prefix import PREFIX, in_order, prefix_of


def test_a_prefix_keeps_its_replica_when_another_one_leaves() -> None:
    replicas = ["a", "b", "c"]
    keys = [prefix_of(b'{"prompt": "%d tell me"}' % number) for number in range(60)]
    assert len(set(keys)) == 60
    first = {key: in_order(key, replicas, str)[0] for key in keys}
    assert set(first.values()) == {"a", "b", "c"}
    assert all(in_order(key, ["a", "b"], str)[0] == first[key] for key in keys if first[key] != "c")


def test_the_prefix_is_the_beginning_of_the_prompt_in_any_form() -> None:
    assert prefix_of(b'{"messages": [{"role": "user", "content": "hello"}]}') == "\nhello"
    assert prefix_of(b'{"input": "x", "instructions": "brief"}') == "brief\nx"
    assert prefix_of(b'{"prompt": [1, 2]}') == "\n1\n2"
    assert prefix_of(b'{"prompt": "%s"}' % (b"a" * 9999)) == prefix_of(b'{"prompt": "%sb"}' % (b"a" * PREFIX))
    assert prefix_of(b"\xff") == prefix_of(b"[1]") == prefix_of(b"{}") == prefix_of(b"[" * 100_000) == ""

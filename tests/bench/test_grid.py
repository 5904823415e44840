"""Which engines run, and which prompts run at once."""

from __future__ import annotations

import pytest

from paceline.bench.command import choose
from paceline.bench.grid import concurrencies
from paceline.bench.groups import check_enough, make_groups
from paceline.cli.bench.command import BenchOptions, choose_prompts
from tests.bench.fake_subject import prompts
from tests.helpers.errors import refused

NOTHING: dict[str, list[str]] = {"draft_model": [], "drafter": []}


def labels(methods: str, k: str = "", **given: str) -> list[str]:
    return [one.label for one in choose(methods, k, **NOTHING | {name: [each] for name, each in given.items()})]


def test_plain_decoding_is_always_there_and_auto_chooses_its_own_k() -> None:
    assert labels("none,ngram,auto", "2,4,8") == ["plain", "ngram k=2", "ngram k=4", "ngram k=8", "auto"]
    assert labels("ngram") == ["plain", "ngram k=auto"]
    assert labels("suffix, ngram ,suffix", "auto,4") == [
        "plain",
        "suffix k=auto",
        "suffix k=4",
        "ngram k=auto",
        "ngram k=4",
    ]
    assert labels("draft-model", "3", draft_model="d") == ["plain", "draft-model k=3"]
    assert labels("medusa,auto", "3", drafter="d") == ["plain", "medusa k=3", "auto"]


@pytest.mark.parametrize(
    ("methods", "k", "field"),
    [
        ("ngrams", "", "methods"),
        ("", "", "methods"),
        ("none", "", "methods"),
        ("ngram", "0", "k"),
        ("ngram", "200", "k"),
        ("ngram", "-3", "k"),
        ("ngram", "four", "k"),
        ("ngram", "2.5", "k"),
        ("auto", "4", "k"),
        ("draft-model", "4", "methods"),
        ("medusa", "4", "methods"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(methods: str, k: str, field: str) -> None:
    with refused(field):
        labels(methods, k)


def test_a_method_whose_model_is_none_is_refused() -> None:
    for method, option in (("draft-model", "draft_model"), ("dspark", "drafter")):
        with refused("methods"):
            labels(method, **{option: "none"})


def test_a_method_with_a_packaged_drafter_needs_none_named() -> None:
    assert labels("dspark", "4") == ["plain", "dspark k=4"]


@pytest.mark.parametrize("option", ["draft_model", "drafter"])
def test_a_draft_model_or_drafter_that_no_method_uses_is_refused(option: str) -> None:
    with refused(option):
        labels("ngram", **{option: "d"})


def test_without_methods_the_first_of_the_table_and_auto_are_compared() -> None:
    assert [one.label for one in choose(**NOTHING)] == ["plain", "ngram k=4", "auto"]
    assert [one.label for one in choose("suffix", **NOTHING)] == ["plain", "suffix k=auto"]


def test_concurrency_is_a_list_of_whole_numbers() -> None:
    assert concurrencies("1, 4,16,4") == [1, 4, 16]
    for wrong in ("", "0", "-1", "1,x", "1000"):
        with refused("concurrency"):
            concurrencies(wrong)


def test_groups_are_full_of_one_workload_as_far_as_it_goes_and_all_workloads_come_in_turn() -> None:
    asked = [*prompts(9), *prompts(6, "code"), *prompts(4, "talk", turns=2)]
    groups, left_out = make_groups(asked, 4)
    assert all(len(group.prompts) == 4 for group in groups)
    assert [group.workload for group in groups] == ["chat", "code", "talk", "chat"]
    assert len(left_out) == 3  # one chat and two code do not fill a group
    groups, left_out = make_groups(asked, 5)
    assert [group.workload for group in groups] == ["chat", "code", None]
    assert {prompt.workload for prompt in groups[2].prompts} == {"chat", "code"}
    assert len(left_out) == 4
    assert all(len({len(prompt.turns) for prompt in group.prompts}) == 1 for group in groups)


def test_at_one_request_at_a_time_nothing_is_left_out() -> None:
    asked = [*prompts(5), *prompts(3, "code", turns=3)]
    groups, left_out = make_groups(asked, 1)
    assert sorted(group.prompts[0].turns for group in groups) == sorted(prompt.turns for prompt in asked)
    assert not left_out


def test_a_run_that_cannot_end_in_a_figure_is_refused_before_it_begins() -> None:
    check_enough(prompts(20), [1, 4], 64)
    check_enough(prompts(4), [1], 64, pairs=1)
    cases = {"prompts": (4, [1], 64), "concurrency": (20, [1, 16], 64), "max_tokens": (10, [1], 2)}
    for field, (count, levels, max_tokens) in cases.items():
        with refused(field):
            check_enough(prompts(count), levels, max_tokens)


def test_our_own_prompts_are_enough_for_16_at_once() -> None:
    for levels in ([1], [1, 4], [1, 4, 16]):
        asked = choose_prompts(BenchOptions(), max(levels))
        check_enough(asked, levels, 64)
    assert len(choose_prompts(BenchOptions(quick=True), 1)) == 25
    assert all(len(prompt.turns) == 1 for prompt in choose_prompts(BenchOptions(raw=True), 1))

"""The formulas against hand-worked values, against simulation and against what docs/theory.md says of them.

A simulated mean may miss by 5 standard errors before a test fails: each comparison raises a false alarm with
probability below 1e-6 over seeds, and the seeds are fixed.
"""

from __future__ import annotations

import doctest
import itertools
import json
import math
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import theory
from paceline.cli.app import run
from paceline.theory import Roofline
from paceline.theory.table import memory_use
from tests.helpers.errors import refused

DOC = Path(__file__).parents[2] / "docs" / "theory.md"
TRIALS, SIGMAS = 20_000, 5.0

alphas = st.floats(0, 1)
costs = st.floats(0, 2)
lengths = st.integers(1, 20)


def agrees(simulate: Callable[[random.Random], float], expected: float) -> bool:
    rng = random.Random(20)
    seen = [simulate(rng) for _ in range(TRIALS)]
    mean = sum(seen) / TRIALS
    variance = sum((value - mean) ** 2 for value in seen) / (TRIALS - 1)
    return abs(mean - expected) <= SIGMAS * math.sqrt(variance / TRIALS) + 1e-12


# -- acceptance and tokens


@given(lengths)
def test_the_ends_are_exact(k: int) -> None:
    assert theory.tokens_per_pass(1.0, k) == k + 1
    assert theory.tokens_per_pass(0.0, k) == 1
    assert theory.tokens_per_pass(math.nextafter(1.0, 0.0), k) == pytest.approx(k + 1)


@pytest.mark.parametrize(("alpha", "k"), [(0.3, 2), (0.8, 5), (0.95, 12)])
def test_tokens_per_pass_agree_with_simulation(alpha: float, k: int) -> None:
    def step(rng: random.Random) -> float:
        return 1 + next((i for i in range(k) if rng.random() >= alpha), k)

    assert agrees(step, theory.tokens_per_pass(alpha, k))
    assert not agrees(step, theory.tokens_per_pass(alpha, k) + 0.1)


def test_rejection_sampling_accepts_as_often_as_the_distributions_overlap() -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]

    def accepted(rng: random.Random) -> float:
        token = rng.choices(range(3), q)[0]
        return float(rng.random() < theory.token_acceptance(p[token], q[token]))

    assert theory.distribution_acceptance(p, q) == pytest.approx(0.2 + 0.2 + 0.2)
    assert agrees(accepted, 0.6)
    assert theory.distribution_acceptance(p, p) == 1


def test_measured_rates_by_hand() -> None:
    assert theory.survival_from_conditional([0.8, 0.5]) == pytest.approx([0.8, 0.4])
    assert theory.tokens_from_survival([0.8, 0.4]) == pytest.approx(2.2)
    assert theory.tokens_from_survival([]) == 1
    assert theory.survival_from_counts([10, 8, 0], [9, 2, 0]) == [0.9, 0.25]


@given(alphas, lengths)
def test_alpha_for_inverts_tokens_per_pass(alpha: float, k: int) -> None:
    tokens = theory.tokens_per_pass(alpha, k)
    found = theory.alpha_for(tokens, k)
    assert found is not None
    assert theory.tokens_per_pass(found, k) == pytest.approx(tokens)


def test_alpha_for_knows_its_limits() -> None:
    assert theory.alpha_for(6.0, 5) == 1
    assert theory.alpha_for(6.01, 5) is None
    assert theory.alpha_for(0.5, 5) == 0


@given(st.floats(0, 1), lengths)
def test_taking_drafts_whole_never_beats_taking_prefixes(alpha: float, k: int) -> None:
    assert theory.whole_prefix_tokens(alpha**k, k) <= theory.tokens_per_pass(alpha, k) + 1e-9


# -- speed-up


def test_speedup_by_hand() -> None:
    assert theory.speedup(0.5, 2, 0.1) == pytest.approx(1.75 / 1.2)
    assert theory.speedup(0.5, 2, 0.1, [1.1, 1.3]) == pytest.approx(1.75 / 1.5)
    assert theory.speedup(0.5, 2, 0.1, lambda k: 1 + k) == pytest.approx(1.75 / 3.2)
    assert theory.speedup_from_survival([0.5, 0.25], 0.1) == pytest.approx(1.75 / 1.2)
    assert theory.speedup_from_survival([], 0.1, 7.0) == 1


@given(alphas, costs, st.lists(st.floats(0.5, 4), min_size=1, max_size=20))
def test_no_k_beats_the_best_k_and_none_is_always_a_candidate(alpha: float, cost: float, check: list[float]) -> None:
    best = theory.best_k(alpha, cost, check, max_k=len(check))
    assert best.speedup >= 1
    assert all(best.speedup >= theory.speedup(alpha, k, cost, check) for k in range(len(check) + 1))
    assert best.k == 0 or best.speedup == theory.speedup(alpha, best.k, cost, check)


@given(alphas, alphas, lengths, costs)
def test_speedup_rises_with_acceptance_and_falls_with_cost(one: float, other: float, k: int, cost: float) -> None:
    low, high = sorted((one, other))
    assert theory.speedup(low, k, cost) <= theory.speedup(high, k, cost)
    assert theory.speedup(low, k, cost) >= theory.speedup(low, k, cost + 0.1)
    assert theory.best_k(low, cost).speedup <= theory.best_k(high, cost).speedup


@given(lengths, costs, st.floats(0.5, 4))
def test_break_even_is_where_the_speedup_crosses_one(k: int, cost: float, check: float) -> None:
    found = theory.break_even(k, cost, check)
    if found is None:
        assert theory.speedup(1.0, k, cost, check) <= 1
    elif found == 0:
        assert theory.speedup(0.0, k, cost, check) >= 1
    else:
        assert theory.speedup(found, k, cost, check) == pytest.approx(1)
        assert theory.speedup(found * 0.99, k, cost, check) < 1


def test_free_drafts_have_no_best_k_but_the_limit() -> None:
    assert theory.best_k(0.5, 0.0, max_k=9).k == 9
    assert theory.best_k(0.0, 0.0, max_k=9) == theory.Best(0, 1.0)
    assert theory.best_k(1.0, 0.5, max_k=9) == theory.Best(9, 10 / 5.5)


def test_a_step_in_the_pass_cost_is_seen_past() -> None:
    """A second peak behind a dear k must not be missed."""
    assert theory.best_k(0.95, 0.01, [2.5, 2.5, 2.5, 2.5, 1.1, 1.1]).k == 6


# -- trees


def test_a_chain_is_a_tree() -> None:
    assert theory.tree_tokens([-1, 0, 1], [0.8] * 3) == pytest.approx(theory.tokens_per_pass(0.8, 3))
    assert theory.tree_tokens([], []) == 1
    assert theory.best_tree([[0.8]] * 3, 3).parents == (-1, 0, 1)


def test_tree_tokens_agree_with_simulation() -> None:
    parents, rates = [-1, -1, 0, 0, 1, 2], [0.5, 0.3, 0.6, 0.2, 0.7, 0.9]

    def walk(rng: random.Random) -> float:
        at, tokens = -1, 1
        while children := [node for node, parent in enumerate(parents) if parent == at]:
            coin = rng.random()
            edges = list(itertools.accumulate(rates[node] for node in children))
            taken = [node for node, edge in zip(children, edges, strict=True) if coin < edge]
            if not taken:
                break
            at, tokens = taken[0], tokens + 1
        return tokens

    assert agrees(walk, theory.tree_tokens(parents, rates))


@given(st.lists(st.floats(0.05, 0.5), min_size=1, max_size=2), st.lists(st.floats(0.05, 0.5), max_size=2))
def test_the_greedy_tree_is_the_best_of_all(first: list[float], second: list[float]) -> None:
    """Against every set of nodes that holds its parents, in the full tree of two levels."""
    levels = [first, second]
    reach = {(i,): rate for i, rate in enumerate(first)}
    reach |= {(i, j): a * b for i, a in enumerate(first) for j, b in enumerate(second)}
    for size in range(len(reach) + 1):
        best = max(
            1 + sum(reach[node] for node in chosen)
            for chosen in itertools.combinations(reach, size)
            if all(node[:1] in chosen for node in chosen)
        )
        tree = theory.best_tree(levels, size)
        assert len(tree.parents) == size
        assert tree.tokens == pytest.approx(best)


@given(st.lists(st.floats(0.01, 0.3), min_size=1, max_size=3), st.integers(0, 30))
def test_the_greedy_tree_counts_its_tokens_as_any_tree_does(ranks: list[float], nodes: int) -> None:
    tree = theory.best_tree([ranks] * 8, nodes)
    above = [tree.reach[parent] if parent >= 0 else 1.0 for parent in tree.parents]
    conditional = [min(1.0, here / before) for here, before in zip(tree.reach, above, strict=True)]
    assert theory.tree_tokens(tree.parents, conditional) == pytest.approx(tree.tokens)
    assert all(tree.depths[j] == (tree.depths[p] if p >= 0 else 0) + 1 for j, p in enumerate(tree.parents))


def test_a_tree_pays_for_levels_when_drafting_and_for_nodes_when_checking() -> None:
    tree = theory.best_tree([[0.5, 0.3], [0.5]], 3)
    assert tree.tokens == pytest.approx(1 + 0.5 + 0.3 + 0.25)
    assert theory.tree_speedup(tree, 0.1, [1.0, 1.1, 1.3]) == pytest.approx(2.05 / (2 * 0.1 + 1.3))
    assert theory.tree_speedup(theory.best_tree([[0.5]], 0), 0.1) == 1


def test_a_tree_s_acceptance_is_counted_by_depth() -> None:
    """Three siblings of which one is right are one hit at depth 1, not a third of one."""
    assert theory.best_tree([[0.4, 0.35, 0.25], [0.5]], 4).survival == pytest.approx([1.0, 0.2])


# -- roofline and memory


def machine(**changes: Any) -> Roofline:
    return Roofline(**{"bandwidth": 1e12, "flops": 100e12, "parameters": 1e9, **changes})


def test_the_roofline_by_hand() -> None:
    """2 GB at 1 TB/s are 2 ms; a row's 2 GFLOP at 100 TFLOP/s are 20 us: equal at 100 rows."""
    here = machine()
    assert here.ridge() == pytest.approx(100)
    assert here.pass_seconds(1, 1) == pytest.approx(2e-3)
    assert here.pass_seconds(40, 5) == pytest.approx(4e-3)
    assert here.verify_cost(40)(4) == pytest.approx(2)
    assert here.verify_cost(100)(4) == pytest.approx(5)
    assert here.stop_batch(tokens=3.0, k=4, draft_cost=0.1) == 52  # 100 * (3 - 0.4) / 5
    assert machine(bytes_per_parameter=4).ridge() == pytest.approx(200)
    assert machine(kv_bytes_per_token=1e5, context=1000).ridge(10) == pytest.approx(150)


@given(alphas, st.integers(1, 10), st.floats(0, 0.5), st.floats(0, 2e5), st.integers(0, 5000), st.floats(5e12, 400e12))
def test_drafting_stops_paying_exactly_at_the_stop_batch(alpha, k, cost, kv, context, flops) -> None:
    here = machine(kv_bytes_per_token=kv, context=context, flops=flops)
    stop = here.stop_batch(theory.tokens_per_pass(alpha, k), k, cost)

    def gains(batch: int) -> float:
        return theory.speedup(alpha, k, cost, here.verify_cost(batch))

    if stop is None:
        assert gains(10**7) >= 1 - 1e-9
    else:
        assert gains(stop) <= 1 + 1e-9
        assert stop == 1 or gains(stop - 1) >= 1 - 1e-9


def test_memory_by_hand() -> None:
    assert theory.kv_bytes_per_token(layers=2, kv_heads=3, head_dim=4) == 96
    assert theory.kv_capacity(1000, 400, 6) == 100
    assert theory.kv_capacity(1000, 1400, 6) == 0
    use = memory_use(1000, 400, 6, 100, 4)
    assert (use.kv_tokens_plain, use.kv_tokens_drafting) == (100, 50)
    assert use.lost_share == 0.5
    assert memory_use(100, 400, 6, 100, 4).lost_share is None


# -- refusals


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: theory.tokens_per_pass(1.2, 5), "alpha"),
        (lambda: theory.tokens_per_pass(math.nan, 5), "alpha"),
        (lambda: theory.tokens_per_pass(0.5, -1), "k"),
        (lambda: theory.speedup(0.5, 3, -0.1), "draft_cost"),
        (lambda: theory.speedup(0.5, 3, math.inf), "draft_cost"),
        (lambda: theory.speedup(0.5, 3, 0.1, [1.0, 1.1]), "verify_cost"),
        (lambda: theory.speedup(0.5, 3, 0.1, 0.0), "verify_cost"),
        (lambda: theory.break_even(0, 0.1), "k"),
        (lambda: theory.whole_prefix_tokens(0.5, 0), "k"),
        (lambda: theory.token_acceptance(0.5, 0.0), "q"),
        (lambda: theory.distribution_acceptance([0.5, 0.6], [0.5, 0.5]), "p"),
        (lambda: theory.distribution_acceptance([1.0], [0.5, 0.5]), "q"),
        (lambda: theory.tree_tokens([0], [0.5]), "parents"),
        (lambda: theory.tree_tokens([-1, -1], [0.6, 0.6]), "rates"),
        (lambda: theory.tree_tokens([-1], []), "conditional"),
        (lambda: theory.best_tree([[0.6, 0.6]], 2), "rates"),
        (lambda: machine(bandwidth=0.0), "bandwidth"),
        (lambda: machine().verify_cost(0), "batch"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_by_name(call: Callable[[], object], field: str) -> None:
    with refused(field):
        call()


# -- the document


def test_the_examples_in_the_document_are_true() -> None:
    text = re.sub(r"^```.*$", "", DOC.read_text(encoding="utf-8"), flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, DOC.name, str(DOC), 0)
    failed, tried = doctest.DocTestRunner().run(examples)
    assert tried > 30
    assert failed == 0


def test_every_number_in_the_document_comes_from_an_example() -> None:
    """A number in prose must stand in a block of code, which the test above runs."""
    parts = DOC.read_text(encoding="utf-8").split("```")
    prose, code = "".join(parts[::2]), "".join(parts[1::2])

    def numbers(text: str) -> set[float]:
        return {float(found) for found in re.findall(r"\d+(?:\.\d+)?", text)}

    assert len(numbers(prose)) > 30
    assert numbers(prose) <= numbers(code)


# -- the command


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["theory", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    answer = json.loads(captured.out)
    assert isinstance(answer, dict)
    return answer


def test_the_command_answers_with_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    answer = asked(capsys, "--alpha", "0.8", "--k", "5", "--draft-cost", "0.07")
    assert answer["k"]["k"] == 5
    assert answer["k"]["tokens_per_pass"] == theory.tokens_per_pass(0.8, 5)
    assert answer["k"]["speedup"] == theory.speedup(0.8, 5, 0.07)
    assert answer["k"]["break_even_alpha"] == theory.break_even(5, 0.07)
    assert answer["best"] == {"k": 7, "speedup": theory.speedup(0.8, 7, 0.07), "is_limit": False}
    assert [each["k"] for each in answer["rows"]] == list(range(1, 65))
    assert answer["roofline"] is answer["memory"] is answer["best_tree"] is answer["plot"] is None


def test_the_table_shows_the_asked_and_the_best_k(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["theory", "--alpha", "0.8", "--k", "5", "--draft-cost", "0.07"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +5 +3\.69 +1\.00 +2\.73x .*asked", out, re.MULTILINE)
    assert re.search(r"^ +7 +4\.16 +1\.00 +2\.79x .*best", out, re.MULTILINE)
    assert "k = 7 is best: 2.79x" in out


def test_the_table_of_the_readme_is_a_table_in_a_narrow_terminal_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for width in (60, 80):
        monkeypatch.setattr("paceline.cli.table.PIPED", width)
        assert run(["theory", "--alpha", "0.8", "--k", "5", "--draft-cost", "0.07"]) == 0
        table = capsys.readouterr().out.partition("a drafted token costs")[0]
        assert re.search(r"^ k +pass +cost +speed-up +α ", table, re.MULTILINE)
        assert re.search(r"^ 5 +3\.69 +1\.00 +2\.73x .*asked", table, re.MULTILINE)
        assert max(map(len, table.splitlines())) <= width


def test_a_table_too_wide_is_printed_row_by_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for width, first in (
        (160, "  k    tokens/pass"),
        (60, "k 1\n  tokens/pass 1.60 · pass cost 1.00 · speed-up 1.60x"),
    ):
        monkeypatch.setattr("paceline.cli.table.PIPED", width)
        assert run(["theory", "--siblings", "0.6,0.2", *ROOFLINE]) == 0
        table = capsys.readouterr().out.partition("a drafted token costs")[0]
        assert first in table
        assert max(map(len, table.splitlines())) <= width


def test_measured_acceptance_is_survival_unless_conditional_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    plain = asked(capsys, "--acceptance", "0.8,0.7,0.6")
    assert plain["k"]["tokens_per_pass"] == pytest.approx(3.1)
    assert plain["best"]["is_limit"] is True
    conditional = asked(capsys, "--acceptance", "0.8,0.7,0.6", "--conditional", "--k", "2")
    assert conditional["k"]["tokens_per_pass"] == pytest.approx(1 + 0.8 + 0.56)
    assert len(conditional["rows"]) == 3


def test_certain_and_hopeless_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    sure = asked(capsys, "--alpha", "1", "--k", "3")
    assert sure["k"]["tokens_per_pass"] == sure["k"]["speedup"] == 4
    never = asked(capsys, "--alpha", "0", "--draft-cost", "0.1")
    assert never["k"] is None
    assert never["best"]["k"] == 0
    assert run(["theory", "--alpha", "0", "--draft-cost", "0.1"]) == 0
    assert "leave drafting off" in capsys.readouterr().out


def test_verification_cost_by_k(capsys: pytest.CaptureFixture[str]) -> None:
    answer = asked(capsys, "--alpha", "0.8", "--verify-cost", "1.1,1.2,3", "--draft-cost", "0.05")
    assert [each["verify_cost"] for each in answer["rows"]] == [1.1, 1.2, 3.0]
    assert answer["best"]["k"] == 2
    same = asked(capsys, "--alpha", "0.8", "--verify-cost", "1.1")
    assert {each["verify_cost"] for each in same["rows"]} == {1.1}


ROOFLINE = ("--bandwidth", "1000", "--tflops", "100", "--parameters", "1B")


def test_the_roofline_trees_and_memory_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--draft-parameters", "100M", "--memory", "16", "--kv-bytes", "50e3", "--batch", "20", "--k", "4")
    answer = asked(capsys, "--siblings", "0.6,0.2", *ROOFLINE, *more)
    assert answer["draft_cost"] == pytest.approx(0.1)
    assert answer["roofline"]["ridge"] == pytest.approx(100)
    assert answer["roofline"]["batch"] == 20
    assert answer["k"]["verify_cost"] == pytest.approx(1.0)
    assert answer["k"]["stop_batch"] == machine().stop_batch(theory.tokens_per_pass(0.6, 4), 4, 0.1)
    assert answer["k"]["tree_tokens_per_pass"] == theory.best_tree([[0.6, 0.2]] * 4, 4).tokens
    assert answer["best_tree"]["tree_speedup"] == max(each["tree_speedup"] for each in answer["rows"])
    assert answer["memory"]["kv_tokens_plain"] == 280_000
    assert answer["memory"]["kv_tokens_drafting"] == 276_000
    assert run(["theory", "--siblings", "0.6,0.2", *ROOFLINE, *more]) == 0
    out = capsys.readouterr().out
    assert "a tree of" in out
    assert "the drafter takes 200 MB: K/V for 276,000 tokens where plain decoding has 280,000 (1.4% less)" in out


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        (("--alpha", "1.2"), "--alpha", "between 0 and 1"),
        (("--alpha", "nan"), "--alpha", "between 0 and 1"),
        ((), "--alpha", "one of --alpha, --acceptance and --siblings"),
        (("--alpha", "0.5", "--siblings", "0.5"), "--alpha", "one of"),
        (("--alpha", "0.5", "--conditional"), "--conditional", "--acceptance"),
        (("--alpha", "0.5", "--k", "0"), "--k", "between 1 and 64"),
        (("--alpha", "0.5", "--draft-cost", "-0.1"), "--draft-cost", "0 or more"),
        (("--alpha", "0.5", "--draft-cost", "nan"), "--draft-cost", "finite"),
        (("--alpha", "0.5", "--verify-cost", "0"), "--verify-cost", "above 0"),
        (("--alpha", "0.5", "--verify-cost", "1,x"), "--verify-cost", "'1,x'"),
        (("--alpha", "0.5", "--verify-cost", "1,1.1", "--k", "3"), "--k", "--verify-cost ends at k = 2"),
        (("--acceptance", "0.5,0.4", "--k", "3"), "--k", "--acceptance ends at k = 2"),
        (("--acceptance", "0.5,0.6"), "--acceptance", "rises at position 2"),
        (("--acceptance", ""), "--acceptance", "numbers"),
        (("--siblings", "0.7,0.5"), "--siblings", "sum to 1.2"),
        (("--alpha", "0.5", "--batch", "4"), "--batch", "--bandwidth"),
        (("--alpha", "0.5", "--bandwidth", "100"), "--bandwidth", "--tflops"),
        (("--alpha", "0.5", "--memory", "80"), "--memory", "--parameters"),
        (("--alpha", "0.5", "--context", "8"), "--context", "--bandwidth"),
        (("--alpha", "0.5", *ROOFLINE, "--batch", "0"), "--batch", "at least 1"),
        (("--alpha", "0.5", *ROOFLINE, "--verify-cost", "1"), "--verify-cost", "leave one of them out"),
        (("--alpha", "0.5", *ROOFLINE[:4], "--parameters", "8Q"), "--parameters", "8B"),
        (("--alpha", "0.5", *ROOFLINE[:4], "--parameters", "-8B"), "--parameters", "above 0"),
        (("--alpha", "0.5", "--plot", "curves.gif"), "--plot", ".png or .svg"),
        (("--alpha", "0.5", "--plot", "no/such/folder/curves.png"), "--plot", "no folder"),
    ],
)
def test_bad_values_are_refused_by_the_flag_s_name(arguments, field, words, capsys) -> None:
    assert run(["theory", *arguments, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["field"] == field
    assert words in error["message"]


# -- the plot


@pytest.mark.parametrize(("name", "magic"), [("curves.png", b"\x89PNG"), ("curves.SVG", b"<?xml")])
@pytest.mark.parametrize(
    "arguments",
    [("--alpha", "0.8", "--k", "5", "--draft-cost", "0.07"), ("--acceptance", "0.7,0.5", *ROOFLINE), ("--alpha", "0")],
)
def test_the_curves_are_drawn(name, magic, arguments, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    assert asked(capsys, *arguments, "--plot", str(tmp_path / name))["plot"] == str(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_without_matplotlib_the_plot_says_what_to_install(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["theory", "--alpha", "0.8", "--plot", str(tmp_path / "curves.png")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: --plot: needs matplotlib: pip install 'paceline[plot]'\n"


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "taken.png").mkdir()
    assert run(["theory", "--alpha", "0.8", "--plot", str(tmp_path / "taken.png")]) == 1
    assert "--plot: cannot write" in capsys.readouterr().err

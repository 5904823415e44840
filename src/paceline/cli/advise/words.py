"""Advice on the terminal: a sentence, predicted beside measured figures, the settings, and the evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.advisor.choice import Figure, Recommendation, by_level, levels_of
from paceline.advisor.result import Advice, paceline_config, paceline_flags
from paceline.bench.report.words import at_once, listed, seconds, seeded
from paceline.cli.output import human_bytes, print_note
from paceline.config import AUTO

if TYPE_CHECKING:
    from paceline.advisor.subject import ActivationsCost

OFF_BY = 0.15  # relative error; a prediction that is further off is reported


def print_advice(advice: Advice) -> None:
    for sentence in sentences(advice):
        print(sentence)
    if advice.predicted:
        _print_table(advice)
    if advice.recommendation is not None:
        for line in settings(advice):
            print(line)
    for note in notes(advice):
        print_note(note)


def sentences(advice: Advice) -> list[str]:
    """Return the advice in sentences, and the first reason against more."""
    best = advice.recommendation
    if best is None:
        return ["Nothing can be advised yet: the run ended before a prediction."]
    levels = levels_of(advice.known)
    reasons = {level: reason.words for level in levels if (reason := advice.reason(level))}
    if best.off:
        first = min(reasons, default=None)
        why = "Nothing that was tried is surely faster than plain decoding." if first is None else reasons[first]
        return [f"Leave speculation off. {why}"]
    lines = [f"{_what(advice, best)} {_gains(advice, best)}"]
    if advice.not_yet:
        lines.append(f"With {listed([at_once(level) for level in advice.not_yet])} it gains nothing.")
    if advice.stops_at is not None:
        if best.contender.method == AUTO:
            lines.append(f"From {advice.stops_at} requests at once it gains nothing, and mostly drafts nothing.")
        else:
            lines.append(f"Switch it off from {advice.stops_at} requests at once.")
    return [*lines, *list(reasons.values())[:1]]


def _what(advice: Advice, best: Recommendation) -> str:
    label, fixed = best.contender.label, advice.best_fixed
    if best.contender.method != AUTO:
        return f"Use {label}."
    what = "Keep the default, auto" if label == AUTO else f"Use {label}"
    if fixed is None:
        return f"{what}: no fixed setting pays."
    return f"{what}: it is as good as the best fixed setting ({fixed.label}), and adapts."


def _gains(advice: Advice, best: Recommendation) -> str:
    """Say the gains that the check measured, and those known from the first half only."""
    checked = set(levels_of(advice.measured))
    unchecked = {key: figure for key, figure in advice.predicted.items() if key[0] not in checked}
    lines = []
    for verb, figures in (("Measured", advice.measured), ("Predicted, not checked", unchecked)):
        if gains := by_level(figures, best.contender).items():
            lines.append(f"{verb}: {listed([f'{figure.ratio:.2f}x with {at_once(level)}' for level, figure in gains])}")
    return f"{'; '.join(lines)}, where plain decoding is 1."


def _print_table(advice: Advice) -> None:
    from paceline.cli.table import print_table

    rows = [
        [
            str(level),
            contender.label,
            *(_figure(half.get((level, contender))) for half in (advice.predicted, advice.measured)),
        ]
        for level, contender in advice.known
    ]
    print_table("times plain decoding [95 %]", ("at once", "setting", "predicted", "measured"), rows, left="setting")


def _figure(figure: Figure | None) -> str:
    if figure is None:
        return "–"
    interval = "" if figure.low is None else f" [{figure.low:.2f}, {figure.high:.2f}]"
    return f"{figure.ratio:.2f}x{interval}"


def settings(advice: Advice) -> list[str]:
    assert advice.recommendation is not None
    contender = advice.recommendation.contender
    keywords = "".join(f", {name}={value!r}" for name, value in paceline_config(contender).items())
    vllm = advice.vllm
    lines = [
        f"paceline   {paceline_flags(contender)}",
        f"           LLM({advice.model!r}{keywords})",
        f"vLLM       {vllm.flag() or 'null'}",
    ]
    return [*lines, f"           ({vllm.note})"] if vllm.note else lines


def notes(advice: Advice) -> list[str]:
    lines = []
    if advice.predicted:
        lines.append("predicted: on the half of the prompts that the choice was made on; measured: on the other half")
    if advice.cost is not None:
        cost = advice.cost
        more = [f"{k} more {cost.verify_cost(1, k):.2f}x" for k in (2, 4, 8)]
        levels = [level for level in cost.decode if level > 1]
        many = [f"{level} requests at once {cost.step_s(level, 0) / cost.step_s(1, 0):.2f}x" for level in levels]
        lines.append(f"a pass takes {seconds(cost.step_s(1, 0))} for one token; with {listed([*more, *many])}")
    if advice.activations is not None:
        lines.append(_activations(advice.activations))
    for drafter in advice.drafters:
        name = drafter.draft_model or drafter.method
        per_token = f" and {human_bytes(drafter.kv_bytes)} a token of context" if drafter.kv_bytes else ""
        grows = f", up to {human_bytes(drafter.most_bytes)} as answers come," if drafter.most_bytes else ""
        held = f"{human_bytes(drafter.memory_bytes)}{per_token}{grows}"
        lines.append(f"{name}: {seconds(drafter.at(1))} for a drafted token, {held} of memory")
    if any(figure.low is None for figure in (*advice.predicted.values(), *advice.measured.values())):
        lines.append("no interval: fewer than 5 groups of that many requests; prompts were grouped anew to get there")
    if about_seeds := seeded(advice.settings):
        lines.append(f"{about_seeds}; `paceline bench --seed none` measures ordinary ones")
    lines += _misses(advice)
    return lines


def _misses(advice: Advice) -> list[str]:
    lines = []
    for (level, contender), measured in advice.measured.items():
        predicted = advice.predicted.get((level, contender))
        if predicted is not None and abs(predicted.ratio / measured.ratio - 1) > OFF_BY:
            off = predicted.ratio / measured.ratio - 1
            lines.append(
                f"the prediction for {contender.label}, {level} at once, is {off:+.0%} off; go by the measurement"
            )
    return lines


def _activations(cost: ActivationsCost) -> str:
    times = listed([f"{cost.share(rows):.2f}x for {rows} row{'s' if rows > 1 else ''}" for rows in cost.int8_s])
    same, positions, kl = (cost.distance[name] for name in ("top1_agreement", "tokens", "mean_kl"))
    return (
        f"a pass with --activations int8 takes {times}; it is another model: the likeliest token is the same at "
        f"{same:.1%} of {positions:.0f} positions of the prompts, KL {kl:.4f}"
    )

"""The curves behind the table. The only file that imports matplotlib, which comes with the `plot` extra."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidParameter
from paceline.theory.acceptance import alpha_for, tokens_from_survival
from paceline.theory.speedup import best_length, break_even, speedup, speedup_from_survival
from paceline.theory.table import Case

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET, RULE = "#1f2933", "#7b8794", "#e4e7eb"
HERE, CEILING, LOSS = "#0b6bcb", "#f08c00", "#c92a2a"
OTHERS = (0.9, 0.7, 0.5, 0.3)
FORMATS = (".png", ".svg")


def draw(case: Case, k: int, file: Path, *, batch: int = 1) -> None:
    """Plot speed-up by k, by acceptance and, with a roofline, by batch; k = 0 marks nothing."""
    if file.suffix.lower() not in FORMATS:
        raise InvalidParameter("--plot", f"must end in {' or '.join(FORMATS)}, got {file.name!r}")
    if not file.absolute().parent.is_dir():
        raise InvalidParameter("--plot", f"there is no folder {file.absolute().parent}; make it first")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidParameter("--plot", "needs matplotlib: pip install 'paceline[plot]'") from None
    panels: list[Callable[[Axes, Case, int], None]] = [_by_k, _by_alpha]
    if case.roofline is not None:
        panels.append(_by_batch)
    with rc_context(_look()):
        figure = Figure(figsize=(5.2 * len(panels), 4.4), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
            panel(axes, case, k)
            _finish(axes)
        figure.suptitle(_title(case, batch), x=0.01, ha="left", fontsize=10, color=QUIET)
        try:
            figure.savefig(file, dpi=160)
        except OSError as error:
            raise InvalidParameter("--plot", f"cannot write {file}: {error.strerror or error}") from None


def _by_k(axes: Axes, case: Case, k: int) -> None:
    """The gap between the two coloured lines is what drafting and checking cost."""
    from matplotlib.ticker import MaxNLocator

    last = min(case.max_k, max(12, k + 2, case.best.k + 4))
    lengths = range(last + 1)
    tops = [2.0]
    for alpha in OTHERS:
        gains = _gains(case.at_alpha(alpha), last)
        tops.append(max(gains))
        axes.plot(lengths, gains, color="#cbd2d9", linewidth=1.2, zorder=1)
        axes.annotate(f"α {alpha:g}", (last, gains[-1]), (14, 0), textcoords="offset points", va="center", color=QUIET)
    tokens = [tokens_from_survival(case.survival[:n]) for n in lengths]
    gains = _gains(case, last)
    axes.plot(lengths, tokens, color=CEILING, linestyle=(0, (4, 2)), label="tokens per pass")
    axes.plot(lengths, gains, color=HERE, marker="o", markersize=3.5, label="speed-up")
    at_edge = case.best.k > 0.8 * last
    if case.best.k:
        _mark(axes, case.best.k, case.best.speedup, f"best k = {case.best.k}: {case.best.speedup:.2f}x", left=at_edge)
    else:
        axes.annotate("no k pays", (0.03, 0.03), xycoords="axes fraction", color=LOSS, weight="bold")
    if k not in (0, case.best.k):
        _mark(axes, k, gains[k], f"k = {k}: {gains[k]:.2f}x", below=True, left=k > max(case.best.k, 0.2 * last))
    axes.legend(loc="upper left")
    top = 1.25 * max(*tops, *tokens, *gains)
    axes.set(title="By tokens drafted ahead", xlabel="k", xlim=(-0.02 * last, 1.02 * last), ylim=(0, top))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _by_alpha(axes: Axes, case: Case, k: int) -> None:
    """Plot one k and the best k for each acceptance: only the first can fall below plain."""
    alphas = [step / 100 for step in range(101)]
    best = [case.at_alpha(alpha).best.speedup for alpha in alphas]
    axes.plot(alphas, best, color=CEILING, linestyle=(0, (4, 2)), label="best k for each α")
    top = min(max(best), max(6.0, 2 * case.best.speedup))
    if k:
        axes.plot(
            alphas, [speedup(a, k, case.draft_cost, case.verify_cost) for a in alphas], color=HERE, label=f"k = {k}"
        )
        alpha = alpha_for(tokens_from_survival(case.survival[:k]), k)
        assert alpha is not None, "k tokens and one more at most"
        gain = speedup_from_survival(case.survival[:k], case.draft_cost, case.verify_cost)
        _mark(axes, alpha, gain, f"α {alpha:.2f}: {gain:.2f}x", left=alpha > 0.3, below=alpha <= 0.3)
        if (even := break_even(k, case.draft_cost, case.verify_cost)) is not None:
            _mark(axes, even, 1.0, f"break-even α {even:.2f}", below=True, color=LOSS)
    axes.legend(loc="upper left")
    axes.set(title="By acceptance", xlabel="α", xlim=(-0.02, 1.02), ylim=(0, 1.25 * top))


def _by_batch(axes: Axes, case: Case, k: int) -> None:
    roofline = case.roofline
    assert roofline is not None
    stop = roofline.stop_batch(tokens_from_survival(case.survival[:k]), k, case.draft_cost) if k else None
    batches = _powers(max(512, 4 * (stop or 1)))
    best = [best_length(case.survival, case.draft_cost, roofline.verify_cost(b)).speedup for b in batches]
    axes.plot(batches, best, color=CEILING, linestyle=(0, (4, 2)), label="best k for each batch")
    top = max(best)
    if k:
        survival = case.survival[:k]
        gains = [speedup_from_survival(survival, case.draft_cost, roofline.verify_cost(b)) for b in batches]
        axes.plot(batches, gains, color=HERE, label=f"k = {k}")
        if stop is not None:
            _mark(axes, stop, 1.0, f"stops at batch {stop}", below=True, left=True, color=LOSS)
    axes.legend(loc="upper right")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(title="By batch", xlabel="sequences decoded together", xlim=(1, batches[-1]), ylim=(0, 1.25 * top))


def _gains(case: Case, last: int) -> list[float]:
    return [speedup_from_survival(case.survival[:n], case.draft_cost, case.verify_cost) for n in range(last + 1)]


def _powers(end: int) -> list[int]:
    """Return whole batches up to `end` or the power of two above it, sixteen to each doubling."""
    batches = {1}
    while max(batches) < end:
        batches.add(max(max(batches) + 1, round(max(batches) * 2 ** (1 / 16))))
    return sorted(batches)


def _mark(
    axes: Axes, x: float, y: float, text: str, *, below: bool = False, left: bool = False, color: str = HERE
) -> None:
    axes.plot([x], [y], marker="o", markersize=7, color=color, markeredgecolor="white", zorder=4)
    offset = (-8 if left else 8 if below else 0, -14 if below else 8)
    align = "right" if left else "left" if below else "center"
    note = axes.annotate(
        text, (x, y), offset, textcoords="offset points", ha=align, color=color, weight="bold", zorder=5
    )
    note.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1})


def _finish(axes: Axes) -> None:
    axes.axhspan(0, 1, color=LOSS, alpha=0.06, linewidth=0, zorder=0)
    axes.axhline(1, color=LOSS, linewidth=0.9, zorder=1)
    axes.annotate(
        "slower than plain", (0.985, 0.03), xycoords="axes fraction", ha="right", va="bottom", color=LOSS, alpha=0.8
    )
    axes.set_ylabel("times plain decoding")
    axes.yaxis.set_major_formatter("{x:g}x")


def _title(case: Case, batch: int) -> str:
    words = f"a drafted token costs {case.draft_cost:g} plain passes"
    return words if case.roofline is None else f"{words} · the two on the left at batch {batch}"


def _look() -> dict[Any, Any]:
    sides: Sequence[str] = ("top", "right", "left")
    return {
        **{f"axes.spines.{side}": False for side in sides},
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color"), QUIET),
        "axes.edgecolor": QUIET,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.titlesize": 12,
        "axes.titlepad": 10,
        "grid.color": RULE,
        "ytick.left": False,
        "legend.framealpha": 0.85,
        "legend.edgecolor": "white",
        "lines.linewidth": 2,
        "font.size": 9,
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "svg.hashsalt": "paceline",
    }

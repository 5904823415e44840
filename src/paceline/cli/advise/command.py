"""`paceline advise`: whether to draft on this machine with these prompts, how, and up to how many requests at once.

Everything that can be refused is refused before the model is loaded. If a run ends early, the results until then are
printed and written, with a list of what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.advisor.advise import LENGTHS, QUICK_LENGTHS, Advisor, check_halves, halves
from paceline.advisor.result import FILES, Advice
from paceline.bench.grid import concurrencies
from paceline.bench.prompts import Prompt, from_file, shipped
from paceline.bench.runner import RunPlan
from paceline.cli.bench.command import choose_folder, packaged_workloads, plan_of, settings_of
from paceline.cli.flags import WHICH, MeasureOptions, argument, flag, with_options
from paceline.cli.output import exit_code, print_and_save, print_json, print_note
from paceline.cli.progress import live
from paceline.errors import InvalidParameter

CONCURRENCY, QUICK_CONCURRENCY = "1,4,16", "1,4"
PER_WORKLOAD, QUICK_PROMPTS = 6, 40


@dataclass(frozen=True, kw_only=True)
class AdviseOptions(MeasureOptions):
    model: str = argument("smollm2", WHICH, "MODEL")
    concurrency: str | None = flag(None, f"Numbers of requests at once to measure; unset: {CONCURRENCY}.", "N,N")
    traffic: str | None = flag(
        None,
        "Count the machines that serve this traffic, with commas between: rate=2 (requests a second), "
        "prompt=200 and answer=100 (tokens), ttft=1 and inter_token=0.1 (limits of p99, in seconds).",
        "NAME=N,...",
    )
    price: float | None = flag(None, "Price of a machine for an hour; needs --traffic.")
    seed: int = flag(0, "Seed of the order of the prompts and of sampling.")

    @property
    def load_options(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "device": self.device, "threads": self.threads}


@with_options
def advise(*, options: AdviseOptions) -> int:
    """Find out whether drafting pays here, with which method and k: chosen on half the prompts, checked on the rest."""
    if options.traffic is not None:
        from paceline.cli.advise.capacity import advise_capacity

        return advise_capacity(options)
    if options.price is not None:
        raise InvalidParameter("price", "has no meaning without --traffic; leave it out")
    levels = sorted(concurrencies(options.concurrency or (QUICK_CONCURRENCY if options.quick else CONCURRENCY)))
    plan = plan_of(options, levels, str(options.seed))
    prompts = choose_prompts(options, max(levels))
    check_halves(halves(prompts), levels, plan.max_tokens)
    folder = choose_folder(options.out, options.model, "paceline-advice", FILES)
    advice, stopped = run(options, prompts, plan)
    print_and_save(folder, lambda: show(advice, as_json=options.json), advice.save)
    return exit_code(stopped, f"interrupted; missing: {', '.join(advice.missing)}")


def show(advice: Advice, *, as_json: bool) -> None:
    if as_json:
        print_json(advice.to_json())
    else:
        from paceline.cli.advise.words import print_advice  # rich takes a while

        print_advice(advice)


def run(options: AdviseOptions, prompts: list[Prompt], plan: RunPlan) -> tuple[Advice, BaseException | None]:
    """Raise what keeps the run from any finding; a later reason to stop is returned beside the advice."""
    quick, draft_models = options.quick, options.draft_model or []
    settings = {**settings_of(plan, options.prompts, prompts), "draft_models": draft_models, "quick": quick}
    with live() as bar:
        bar.stage("starting")
        from paceline.advisor.subject import AdviceSubject

        subject = AdviceSubject(
            options.model, draft_models=draft_models, progress=bar.load, raw=options.raw, **options.load_options
        )
        for draft_model, why in subject.refused.items():
            print_note(f"going on without {draft_model}: {why}")
        subject.check(prompts, plan.max_tokens)
        advice = Advice(model=options.model, settings=settings, where=subject.where(), refused=subject.refused)
        lengths = QUICK_LENGTHS if quick else LENGTHS
        stopped = Advisor(subject, prompts, plan, advice, bar.work, lengths, rival=not quick).run()
    if stopped is not None and (advice.cost is None or isinstance(stopped, InvalidParameter)):
        if isinstance(stopped, KeyboardInterrupt):
            print_note(f"stopped before there was a result; missing: {', '.join(advice.missing)}")
        raise stopped
    return advice, stopped


# -- what can be refused before anything is loaded


def choose_prompts(options: AdviseOptions, most: int) -> list[Prompt]:
    """Read the user's prompts, or choose packaged ones; a quick run takes every n-th prompt of a large file."""
    if options.prompts is not None:
        prompts = from_file(options.prompts)
        return prompts[:: max(len(prompts) // max(QUICK_PROMPTS, 2 * most), 1)] if options.quick else prompts
    names = packaged_workloads(options)
    needed = QUICK_PROMPTS if options.quick else PER_WORKLOAD * len(names)
    return shipped(names, -(-max(needed, 2 * most) // len(names)))

"""`paceline advise --traffic`: how many such machines serve a traffic, with speculation and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.bench.prompts import from_file, shipped
from paceline.cli.output import human_bytes, print_json, print_note
from paceline.cli.progress import live
from paceline.config import AUTO, EngineConfig, SpeculationConfig
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from paceline.advisor.capacity import CacheHolds, Capacity, LoadCurve, Traffic
    from paceline.bench.results import Spread
    from paceline.cli.advise.command import AdviseOptions

SECONDS, QUICK_SECONDS = 20.0, 4.0  # time of each point of the load curve
AT_ONCE, QUICK_AT_ONCE = 64, 16  # requests that find the highest rate
PLAIN = "plain decoding"


def advise_capacity(options: AdviseOptions) -> int:
    from paceline.advisor.capacity import Capacity, Traffic

    for name in ("concurrency", "max_tokens", "seed", "out"):
        if getattr(options, name):
            raise InvalidParameter(name.replace("_", "-"), "has no meaning with --traffic; leave it out")
    if options.price is not None and not options.price > 0:
        raise InvalidParameter("price", f"must be above 0, got {options.price:g}")
    traffic = Traffic.parse(options.traffic or "")
    curves, cache_holds = measure(options, traffic)
    capacity = Capacity(traffic, curves, cache_holds, options.price)
    if options.json:
        print_json(capacity.to_json())
    else:
        show(capacity)
    return 0


def measure(options: AdviseOptions, traffic: Traffic) -> tuple[dict[str, LoadCurve], CacheHolds]:
    prompts = from_file(options.prompts) if options.prompts is not None else shipped()
    speculation = SpeculationConfig(method=AUTO, draft_model=tuple(options.draft_model or ()))
    with live() as bar:
        bar.stage("starting")
        from paceline.advisor import capacity
        from paceline.build import load

        target = load(options.model, progress=bar.load, **options.load_options)
        config = EngineConfig(max_num_seqs=AT_ONCE)
        plain, drafting, cache_holds = capacity.build_pair(target, speculation, traffic, config)
        tokenizer = target.loaded.tokenizer
        talks = [prompt.messages([]) for prompt in prompts]
        texts = [
            tokenizer.encode(str(talk[-1]["content"])) if options.raw else tokenizer.apply_chat_template(talk)
            for talk in talks
        ]
        texts = [text for text in texts if text]
        drivers = {
            label: capacity.LoadDriver(engine, capacity.prompts_of(texts, traffic.prompt), traffic, options.temperature)
            for label, engine in ((PLAIN, plain), (AUTO, drafting))
        }
        at_once, seconds = (QUICK_AT_ONCE, QUICK_SECONDS) if options.quick else (AT_ONCE, SECONDS)
        return capacity.measure(drivers, traffic, at_once=at_once, seconds=seconds, on_progress=bar.work), cache_holds


def show(capacity: Capacity) -> None:
    from paceline.cli.table import print_table

    for label in capacity.curves:
        print(sentence(capacity, label))
    rows = [
        [
            label,
            f"{point.rate:.2f}",
            *milliseconds(point.ttft_s),
            *milliseconds(point.inter_token_s),
            "yes" if point.meets(capacity.traffic) else "no",
        ]
        for label, curve in capacity.curves.items()
        for point in sorted(curve.points, key=lambda each: each.rate)
    ]
    columns = ("setting", "requests/s", "TTFT p50", "p99", "inter-token p50", "p99 ", "within limits")
    print_table("latencies in ms at rates of one machine", columns, rows, left="setting")
    for note in notes(capacity):
        print_note(note)


def milliseconds(seconds: Spread | None) -> list[str]:
    return ["–", "–"] if seconds is None else [f"{1e3 * value:.0f}" for value in (seconds.p50, seconds.p99)]


def sentence(capacity: Capacity, label: str) -> str:
    machines, curve = capacity.machines(label), capacity.curves[label]
    if machines is None:
        slowest = min(point.rate for point in curve.points)
        return f"{label}: one machine does not keep the limits even at {slowest:.2f} requests/s."
    price = capacity.per_million(label)
    cost = "" if price is None else f"; a million tokens of answers cost {price:,.2f}"
    some = "1 such machine" if machines == 1 else f"{machines} such machines"
    return f"{label}: {some}; one serves {curve.within(capacity.traffic):.2f} requests/s within the limits{cost}."


def notes(capacity: Capacity) -> list[str]:
    lines = ["the engine alone, in this process, without prefix caching; requests arrive at random"]
    fewest = min(point.requests for curve in capacity.curves.values() for point in curve.points)
    if fewest < 100:
        lines.append(f"p99 of fewer than 100 requests ({fewest} at least) is the worst of them")
    if (holds := capacity.cache_holds) is not None:
        memory = f"{human_bytes(holds.weight_bytes)} and {human_bytes(holds.kv_bytes)} a token of context"
        lines.append(
            f"the drafters take {memory}: the cache holds {holds.drafting} such sequences at once, "
            f"{holds.plain} without them"
        )
    return lines

"""`paceline advise --traffic`: how many such machines serve a traffic, with speculation and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.bench.prompts import from_file, shipped
from paceline.cli.output import human_bytes, print_json, print_note
from paceline.cli.progress import live
from paceline.config import AUTO, EngineConfig, SpeculationConfig
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from paceline.advisor.traffic import Capacity, Curve, Seats, Traffic
    from paceline.cli.advise.command import AdviseOptions

SECONDS, QUICK_SECONDS = 20.0, 4.0  # of each point of the load curve
AT_ONCE, QUICK_AT_ONCE = 64, 16
PLAIN = "plain decoding"


def advise_capacity(options: AdviseOptions) -> int:
    from paceline.advisor.traffic import Capacity, Traffic

    for name in ("concurrency", "max_tokens", "seed", "out"):
        if getattr(options, name):
            raise InvalidParameter(name.replace("_", "-"), "has no meaning with --traffic; leave it out")
    if options.price is not None and not options.price > 0:
        raise InvalidParameter("price", f"must be above 0, got {options.price:g}")
    traffic = Traffic.parse(options.traffic or "")
    curves, seats = measure(options, traffic)
    capacity = Capacity(traffic, curves, seats, options.price)
    if options.json:
        print_json(capacity.to_json())
    else:
        show(capacity)
    return 0


def measure(options: AdviseOptions, traffic: Traffic) -> tuple[dict[str, Curve], Seats]:
    prompts = from_file(options.prompts) if options.prompts is not None else shipped()
    speculation = SpeculationConfig(method=AUTO, draft_model=tuple(options.draft_model or ()))
    with live() as bar:
        bar.stage("starting")
        from paceline.advisor import traffic as load_curve
        from paceline.advisor.seats import build_pair
        from paceline.build import load

        target = load(options.model, progress=bar.load, **options.load_options)
        plain, drafting, seats = build_pair(target, speculation, traffic, EngineConfig(max_num_seqs=AT_ONCE))
        tokenizer = target.loaded.tokenizer
        talks = [prompt.messages([]) for prompt in prompts]
        texts = [
            tokenizer.encode(str(talk[-1]["content"])) if options.raw else tokenizer.apply_chat_template(talk)
            for talk in talks
        ]
        texts = [text for text in texts if text]
        drivers = {
            label: load_curve.Driver(engine, load_curve.prompts_of(texts, traffic.prompt), traffic, options.temperature)
            for label, engine in ((PLAIN, plain), (AUTO, drafting))
        }
        at_once, seconds = (QUICK_AT_ONCE, QUICK_SECONDS) if options.quick else (AT_ONCE, SECONDS)
        return load_curve.measure(drivers, traffic, at_once=at_once, seconds=seconds, on_progress=bar.work), seats


def show(found: Capacity) -> None:
    from paceline.cli.table import print_table

    for label in found.curves:
        print(sentence(found, label))
    rows = [
        [
            label,
            f"{point.rate:.2f}",
            *(f"{1e3 * value:.0f}" for value in (point.ttft_p50, point.ttft_p99)),
            *(f"{1e3 * value:.0f}" for value in (point.inter_token_p50, point.inter_token_p99)),
            "yes" if point.meets(found.traffic) else "no",
        ]
        for label, curve in found.curves.items()
        for point in sorted(curve.points, key=lambda each: each.rate)
    ]
    columns = ("setting", "requests/s", "TTFT p50", "p99", "inter-token p50", "p99 ", "within limits")
    print_table("latencies in ms at rates of one machine", columns, rows, left="setting")
    for note in notes(found):
        print_note(note)


def sentence(found: Capacity, label: str) -> str:
    machines, curve = found.machines(label), found.curves[label]
    if machines is None:
        return (
            f"{label}: one machine does not keep the limits even at {min(p.rate for p in curve.points):.2f} requests/s."
        )
    price = found.per_million(label)
    cost = "" if price is None else f"; a million tokens of answers cost {price:,.2f}"
    some = "1 such machine" if machines == 1 else f"{machines} such machines"
    return f"{label}: {some}; one serves {curve.within(found.traffic):.2f} requests/s within the limits{cost}."


def notes(found: Capacity) -> list[str]:
    lines = ["the engine alone, in this process, without prefix caching; requests arrive at random"]
    fewest = min(point.requests for curve in found.curves.values() for point in curve.points)
    if fewest < 100:
        lines.append(f"p99 of fewer than 100 requests ({fewest} at least) is the worst of them")
    if (seats := found.seats) is not None:
        held = f"{human_bytes(seats.weight_bytes)} and {human_bytes(seats.kv_bytes)} a token of context"
        lines.append(
            f"the drafters take {held}: the cache holds {seats.drafting} such sequences at once, "
            f"{seats.plain} without them"
        )
    return lines

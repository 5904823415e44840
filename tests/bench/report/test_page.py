"""results.json is read back the same; report.html: what it says, that it stands alone, and that all is escaped."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import math
import re
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paceline.bench.findings import verdict
from paceline.bench.report import page as report
from paceline.bench.report import plots
from paceline.bench.report import words as report_words
from paceline.bench.report.figures import series_of
from paceline.bench.results import Cell, Results, Speedup, Spread, WithoutLoops
from paceline.cli.bench.tables import notes
from tests.helpers.errors import refused

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NASTY = "<script>alert('x')</script>\"'&<b>"
VOID = {"meta", "input", "br", "link", "img", "hr"}


def cell(
    workload: str = "all", concurrency: int = 1, label: str = "ngram k=4", ratio: float | None = 1.3, **more: object
) -> Cell:
    method, _, k = label.partition(" k=")
    speedup = None if ratio is None else Speedup(ratio=ratio, low=ratio * 0.95, high=ratio * 1.05, pairs=12)
    drafted = () if label == "plain" else (100, 80, 60, 40)
    values: dict[str, object] = {
        "answers": 12,
        "tokens": 1200,
        "seconds": 20.0,
        "tokens_per_s": 60.0 * (ratio or 1.0),
        "speedup": speedup,
        "tau": 1.0 if label == "plain" else 1.6,
        "acceptance_rate": None if label == "plain" else 0.4,
        "drafted_per_position": drafted,
        "accepted_per_position": tuple(count // 2 for count in drafted),
        "ttft_s": Spread(p50=0.05, p99=0.12),
        "inter_token_s": Spread(p50=0.016, p99=0.041),
        "request_s": Spread(p50=1.9, p99=2.8),
        "engine_share": 0.04,
        **more,
    }
    chosen = "none" if label == "plain" else method
    return Cell(  # type: ignore[arg-type]
        workload=workload, concurrency=concurrency, method=chosen, k=int(k) if k else None, label=label, **values
    )


def plain(workload: str = "all", concurrency: int = 1, **more: object) -> Cell:
    return cell(workload, concurrency, "plain", None, **more)


def results(*cells: Cell, **more: object) -> Results:
    values: dict[str, object] = {
        "where": {"cpu": "a toy processor", "cores": 2, "torch": "2.11"},
        "settings": {"methods": ["none", "ngram"], "k": [4], "max_tokens": 128, "temperature": 0.0, "seed": None},
        **more,
    }
    return Results(paceline="0.1.0", date="2026-11-15", model="smollm2", cells=cells, **values)  # type: ignore[arg-type]


def rich() -> Results:
    """Some of everything."""
    cells = []
    for concurrency, gain in ((1, 1.4), (4, 1.1), (16, 0.97)):
        for workload, factor in (("all", 1.0), ("chat", 0.9), ("quote", 1.6)):
            cells.append(plain(workload, concurrency))
            for label, own in (("ngram k=2", 0.95), ("ngram k=8", 0.9), ("auto", 1.0)):
                loops = {"looping": 2, "without_loops": WithoutLoops(answers=10)} if workload == "all" else {}
                cells.append(cell(workload, concurrency, label, gain * factor * own, identical=True, **loops))
    short = "3 pairs measured, and fewer than 5 are not enough: give more prompts"
    cells.append(cell("sql", 16, "auto", None, too_short=short, tokens_per_s=None))
    return results(*cells, complete=False)


class Page(HTMLParser):
    """Elements with their attributes, the text outside scripts and styles, and what was opened and not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page(found: Results) -> Page:
    return Page(report.render(found))


# -- results.json


def test_results_survive_a_file(tmp_path: Path) -> None:
    rich().save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == rich()
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_fields_of_a_later_version_are_left_out() -> None:
    found = rich().to_json()
    found["moon"] = found["cells"][0]["moon"] = found["cells"][1]["speedup"]["moon"] = "full"
    assert Results.from_json(found) == rich()
    keys = {"workload", "concurrency", "method", "k", "label", "speedup", "too_short", "tau", "identical"}
    assert keys < set(found["cells"][0])  # the report and the advisor rely on these


def test_what_is_not_finite_becomes_null() -> None:
    found = Results(paceline="0", date="", model="m", where={"x": math.nan, "y": [math.inf, 1.5]}).to_json()
    assert found["where"] == {"x": None, "y": [None, 1.5]}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"cells": 5}', '{"cells": [{}]}', '{"cells": [5]}', "null"])
def test_what_is_no_results_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with refused("results"):
        Results.load(tmp_path / "results.json")
    with refused("results"):
        Results.load(tmp_path / "missing.json")


# -- the verdict


def sentence(*cells: Cell, **more: object) -> str:
    return verdict(results(*cells, **more)).sentence


def test_a_gain_everywhere_says_switch_it_on() -> None:
    found = verdict(results(plain(), cell(ratio=1.31), cell(label="auto", ratio=1.42)))
    assert found.sentence == "Switch it on: auto is 1.42× as fast as plain decoding."
    assert found.tone == "good"
    assert "1.35 to 1.49" in found.caption


def test_a_gain_at_low_concurrency_only_says_up_to_where() -> None:
    cells = [plain(), cell(ratio=1.3), cell(concurrency=4, ratio=1.2), cell(concurrency=16, label="auto", ratio=0.98)]
    found = verdict(results(*cells))
    assert "With 4 requests at a time ngram k=4 is the fastest: 1.20× (1.14 to 1.26)." in found.details
    assert found.sentence.startswith("Switch it on for up to 4 requests at a time: ngram k=4 is 1.30×")
    closest = "With 16 requests at a time nothing is clearly faster than plain decoding: auto comes closest at 0.98×"
    assert any(detail.startswith(closest) for detail in found.details)


WIDE = Speedup(ratio=1.9, low=0.9, high=4.0, pairs=5)
SERVER = {"url": "http://h/v1"}
SENTENCES = {
    "a gain at some concurrencies names them": (
        [cell(ratio=0.8), cell(concurrency=4, ratio=1.2), cell(concurrency=16, ratio=1.3)],
        "Switch it on for 4 and 16 requests at a time: ",
    ),
    "no clear gain": ([plain(), cell(ratio=1.02)], "Leave it off: nothing measured is clearly faster"),
    "losing everywhere": ([plain(), cell(ratio=0.8), cell(label="auto", ratio=0.9)], "Leave it off: everything"),
    "the interval decides and not the dot": (
        [plain(), cell(label="auto", ratio=1.9, speedup=WIDE), cell(ratio=1.2)],
        "Switch it on: ngram k=4 is 1.20×",
    ),
    "one workload is all there is": ([plain("chat"), cell("chat", ratio=1.3)], "Switch it on: ngram k=4 is 1.30×"),
    "an endpoint alone has its speed": (
        [cell(label="endpoint", ratio=None)],
        "Tokens per second of this server: 60.0 with one request at a time.",
    ),
    "an endpoint is compared with its baseline": (
        [plain(), cell(label="endpoint", ratio=1.5)],
        "The endpoint is faster: it is 1.50× as fast as the baseline.",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_the_verdict_is_one_sentence(case: str) -> None:
    cells, start = SENTENCES[case]
    assert sentence(*cells, endpoint=SERVER if "endpoint" in case else None).startswith(start)


def test_the_best_of_several_may_be_chance() -> None:
    def close(label: str) -> Cell:
        return cell(label=label, speedup=Speedup(ratio=1.10, low=1.01, high=1.198, pairs=12))

    assert sentence(plain(), close("auto")) == "Switch it on: auto is 1.10× as fast as plain decoding."
    several = [plain(), *(close(label) for label in ("auto", "ngram k=2", "ngram k=4", "ngram k=8"))]
    assert "auto was the fastest of 4 compared, which may be chance" in sentence(*several)
    beside = verdict(results(*several, cell(concurrency=4, ratio=1.3)))
    assert beside.sentence.startswith("Switch it on for 4 requests")
    chance = "auto is the fastest of 5 compared at 1.10× (1.01 to 1.20), which may be chance."
    assert f"With one request at a time {chance}" in beside.details


def test_where_answers_loop_the_figure_without_them_decides() -> None:
    slow = WithoutLoops(answers=9, speedup=Speedup(ratio=0.9, low=0.85, high=0.95, pairs=9))
    looping = cell(ratio=1.5, looping=3, without_loops=slow)
    found = verdict(results(plain(), looping))
    assert found.sentence.startswith("Leave it off")
    assert "0.85 to 0.95, answers that loop left out" in found.caption
    nothing_left = cell(ratio=1.5, looping=12, without_loops=WithoutLoops(answers=0))
    assert sentence(plain(), nothing_left).startswith("Without the answers that loop, too little was measured")
    beside = verdict(results(cell(ratio=1.2), dataclasses.replace(nothing_left, concurrency=4)))
    assert "With 4 requests at a time too little is left without the answers that loop." in beside.details


def test_too_little_says_so_and_gives_no_figure() -> None:
    found = verdict(results(plain(), cell(ratio=None, too_short="1 pair measured")))
    assert found.sentence == "Too little was measured to say whether speculation pays."
    assert found.figure is None
    assert verdict(results()).figure is None


def test_where_it_does_best_and_worst_is_named() -> None:
    cells = [plain(), cell(ratio=1.3), cell("quote", ratio=2.0), cell("creative", ratio=0.9), cell("chat", ratio=1.1)]
    assert "from 0.90× (creative) to 2.00× (quote)" in " ".join(verdict(results(*cells)).details)


# -- the page


def test_the_page_is_well_formed_and_shows_every_section_and_every_cell() -> None:
    found = page(rich())
    assert found.open == []
    sections = {attributes.get("id") for attributes in found.all("section")}
    assert {"speed-up", "workloads", "speed", "acceptance", "latency", "loops", "cells", "how", "reading"} <= sections
    assert report.render(rich()).partition('<table id="all">')[2].count("<tr>") == 1 + len(rich().cells)
    assert "ngram k=2, position 2: 40 of 80 accepted" in found.text  # of the steps that drafted so far
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_page_loads_nothing_and_may_not() -> None:
    found = page(rich())
    for tag, attributes in found.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        assert not {"src", "href", "xlink:href", "action", "srcset"} & set(attributes), attributes
        assert not [name for name in attributes if name.startswith("on") or name == "style"], attributes
    text = report.render(rich())
    assert "url(" not in text
    assert "@import" not in text
    policies = [attributes["content"] for attributes in found.all("meta") if "http-equiv" in attributes]
    assert policies
    assert "default-src 'none'" in str(policies[0])


def test_the_policy_names_the_very_script_in_the_page() -> None:
    text = report.render(results())
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


def test_whatever_comes_from_outside_is_escaped() -> None:
    nasty = [
        plain(NASTY),
        cell(NASTY, label=NASTY, ratio=1.2, too_short=NASTY, identical=False, looping=1),
        plain("all"),
        cell("all", label=NASTY, ratio=1.2, looping=1),
        plain("chat"),
        cell("chat", label=NASTY, ratio=1.2),
    ]
    found = results(
        *nasty,
        settings={NASTY: NASTY, "list": [NASTY]},
        where={"cpu": NASTY, "device": NASTY},
        endpoint={"url": NASTY, "server": NASTY, "acceptance": {NASTY: NASTY}},
    )
    text = report.render(dataclasses.replace(found, model=NASTY, date=NASTY, paceline=NASTY))
    parsed = Page(text)
    assert parsed.open == []
    assert len(parsed.all("script")) == 1
    assert NASTY not in text
    assert NASTY in parsed.text
    assert not [name for _, attributes in parsed.elements for name in attributes if not re.fullmatch(r"[\w:-]+", name)]


def test_positions_seen_a_few_times_are_faded_with_their_counts() -> None:
    seldom = cell(drafted_per_position=(100, 29), accepted_per_position=(50, 3))
    found = page(results(plain(), seldom))
    assert "3/29" in found.words
    assert "50/100" not in found.words
    faded = [attributes for _, attributes in found.elements if "faded" in (attributes.get("class") or "")]
    assert len(faded) == 2  # a mark, and the line to it


def test_the_page_has_what_others_report_too() -> None:
    sample = {"label": "auto", "prompt": NASTY, "pieces": [["plain ", False], [NASTY, True]]}
    times = Spread(p50=0.05, p90=0.071, p95=0.083, p99=0.12)
    short_repr = cell(prompt_tokens_per_s=812.0, ttft_s=times)
    settings = {"command": "paceline bench --quick"}
    found = page(results(plain(), short_repr, sample=sample, settings=settings))
    for words in ("812", "71 ms", "83 ms", "paceline bench --quick", f"plain {NASTY}".split()[0]):
        assert words in found.text
    assert {"class": "accepted"} in found.all("span")
    assert "<span>--quick</span>" in report.render(results(plain(), short_repr, settings=settings)), (
        "a flag stays whole"
    )
    assert "| ngram k=4 | 1 | 78.0 | 812 | 1.30× (1.23 to 1.37) | 1.60 | 50 ms / 120 ms |" in found.text
    assert NASTY not in report.render(results(plain(), short_repr, sample=sample))


CLEAN = WithoutLoops(answers=10, speedup=Speedup(ratio=1.11, low=1.05, high=1.17, pairs=10))
REPORTED = {
    "an unfinished run": (rich(), "This run was not finished"),
    "short cells": (rich(), "Too little was measured for a figure in 1 cell of 37"),
    "the reason of short cells": (
        rich(),
        "3 pairs measured, and fewer than 5 are not enough: give more prompts (1 cell)",
    ),
    "changed answers": (
        results(plain(), cell(identical=False)),
        "Some answers differ from those of plain decoding ngram k=4, all, one request at a time",
    ),
    "prompts left out": (
        results(plain(), cell(), settings={"left_out": {"4": 3, "16": 1}}),
        "3 prompts with 4 requests at a time and 1 prompt with 16 requests at a time, for they filled",
    ),
    "loops": (results(plain(), cell(looping=2, without_loops=CLEAN)), "Looping answers, apart"),
    "the figure without loops": (results(plain(), cell(looping=2, without_loops=CLEAN)), "1.11× 1.05 to 1.17"),
    "nothing": (results(complete=False), "Nothing was measured"),
}


@pytest.mark.parametrize("what", REPORTED)
def test_what_limits_the_figures_is_reported_where_there_is_any(what: str) -> None:
    found, words = REPORTED[what]
    assert page(found).open == []
    assert words in page(found).text
    assert words not in page(results(plain(), cell())).text


def test_the_report_notes_that_seeded_requests_follow_the_seeded_rule() -> None:
    given = {"draft_model": "small", "temperature": 0.8, "seed": 0}
    for change, short_repr in (
        ({}, True),
        ({"temperature": 0.0}, False),
        ({"seed": None}, False),
        ({"draft_model": None}, False),
    ):
        found = results(plain(), cell(), settings={**given, **change})
        assert ("judged by the seeded rule" in page(found).text) is short_repr
        assert any("--seed none measures ordinary ones" in line for line in notes(found)) is short_repr


def test_an_endpoint_with_few_figures_still_gives_a_page() -> None:
    bare = Cell(workload="all", concurrency=1, method="endpoint", label="endpoint", answers=1, tokens=0, seconds=0.1)
    found = page(results(bare, endpoint={"url": "http://h/v1", "model": "m", "server": None, "acceptance": None}))
    assert found.open == []
    assert "http://h/v1" in found.text


def test_writing_leaves_no_half_a_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report.write(rich(), path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text(encoding="utf-8").endswith("</html>")


# -- the drawings


def positions(drawing: str, tag: str, attribute: str) -> list[float]:
    root = ElementTree.fromstring(drawing)
    found = [element for element in root.iter() if element.tag == tag and element.get("class", "") != "grid"]
    return [float(str(element.get(attribute)).rstrip("%")) for element in found if element.get(attribute)]


def spread_over(ratio: float, low: float, high: float) -> Speedup:
    return Speedup(ratio=ratio, low=low, high=high, pairs=9)


@pytest.mark.parametrize(("ratios", "ends"), [([1.0], (0.99, 1.01)), ([0.3, 5.0], (0.2, 40.0)), ([1.7], (1.6, 1.8))])
def test_the_axis_of_speed_ups_always_shows_1(ratios: list[float], ends: tuple[float, float]) -> None:
    axis = plots.ratio_axis([spread_over(ratio, *ends) for ratio in ratios])
    assert 1 in axis.ticks
    assert all(axis.low < ratio < axis.high for ratio in ratios)
    assert len(axis.ticks) <= 8


@pytest.mark.parametrize("greatest", [0.0021, 0.9, 1.0, 7.3, 99, 101, 12345])
def test_an_axis_from_zero_ends_on_a_round_figure_just_above(greatest: float) -> None:
    axis = plots.zero_axis([greatest, greatest / 3])
    assert greatest <= axis.high * 1.02
    assert axis.high <= 2 * greatest
    assert 3 <= len(axis.ticks) <= 6


def test_methods_have_colours_and_their_k_have_shapes() -> None:
    found = series_of(rich().cells)
    assert list(found) == ["plain", "ngram k=2", "ngram k=8", "auto"]
    assert found["ngram k=2"].colour == found["ngram k=8"].colour != found["auto"].colour
    assert found["ngram k=2"].shape != found["ngram k=8"].shape
    assert series_of([cell(label="endpoint")])["endpoint"].colour == 1  # grey is plain decoding's


def test_every_drawing_of_the_page_is_xml_inside_its_width() -> None:
    drawings = re.findall(
        r"<svg width=\"100%\".*?</svg>(?=</div>|<p|\s*<p|<span|\s*</div>)", report.render(rich()), re.DOTALL
    )
    assert len(drawings) > 30
    for drawing in drawings:
        for attribute in ("x", "x1", "x2"):
            assert all(0 <= value <= 100 for value in positions(drawing, "line", attribute))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0000123, "12 µs"),
        (0.0012, "1.2 ms"),
        (0.0312, "31 ms"),
        (0.9996, "1.00 s"),
        (2.5, "2.50 s"),
        (73.2, "73.2 s"),
    ],
)
def test_times_are_written_with_few_digits(seconds: float, words: str) -> None:
    assert report_words.seconds(seconds) == words


# -- a browser


def test_every_colour_that_is_used_is_defined() -> None:
    style = (Path(report.__file__).parent / "report.css").read_text(encoding="utf-8")
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) == set(re.findall(r"(--[\w-]+):", style))


def chromium(page: Path, *options: str) -> str:
    with tempfile.TemporaryDirectory() as profile:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        command += ["--no-first-run", f"--user-data-dir={profile}", *options, page.as_uri()]
        done = subprocess.run(command, capture_output=True, timeout=60, check=True)
        return done.stdout.decode()


PROBE = """<script>
onload = () => { document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement, button = page.getElementById("theme");
    const before = getComputedStyle(page.body).backgroundColor;
    button.click();
    page.querySelectorAll("#all th button")[3].click();
    const speeds = [...page.querySelectorAll("#all tbody tr")].map(row => parseFloat(row.cells[3].textContent));
    return {
        overflow: root.scrollWidth - root.clientWidth,
        button: button.hidden ? "hidden" : "shown",
        changed: getComputedStyle(page.body).backgroundColor !== before,
        narrow: [...page.querySelectorAll("#speed-up svg.track")].filter(
            drawing => drawing.getBoundingClientRect().width < 80).length,
        sorted: speeds.every((speed, place) => isNaN(speed) || place === 0 || speeds[place - 1] <= speed),
        last: isNaN(speeds[speeds.length - 1]),
        panels: [...page.querySelectorAll(".panel")].filter(panel => getComputedStyle(panel).display !== "none").length,
    };
})); }
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_shows_the_page_on_a_phone_and_on_a_desk(tmp_path: Path) -> None:
    """Nothing overflows, no drawing is lost, the script runs under the policy: light and dark change, columns sort
    with dashes last, and of each set of tabs one is open."""
    text = html.escape(report.render(rich()))
    frames = "".join(f'<iframe srcdoc="{text}" style="width:{width}px;height:800px"></iframe>' for width in (360, 1200))
    probe = tmp_path / "probe.html"
    probe.write_text(f"<!doctype html><title>-</title>{frames}{PROBE}", encoding="utf-8")
    found = re.search(r"<title>(.*?)</title>", chromium(probe, "--dump-dom"))
    right = {"overflow": 0, "button": "shown", "changed": True, "narrow": 0, "sorted": True, "last": True, "panels": 2}
    assert json.loads(found[1]) == [right, right]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_draws_the_page_without_scripts(tmp_path: Path) -> None:
    """The policy is made to refuse the script; the picture is far from a blank page's."""
    path, picture = tmp_path / "report.html", tmp_path / "report.png"
    path.write_text(report.render(rich()).replace("script-src 'sha256-", "script-src 'sha256-not-"), encoding="utf-8")
    chromium(path, f"--screenshot={picture}", "--window-size=600,900")
    blank = tmp_path / "blank.html"
    blank.write_text("<!doctype html><title>-</title>", encoding="utf-8")
    chromium(blank, f"--screenshot={tmp_path / 'blank.png'}", "--window-size=600,900")
    assert picture.stat().st_size > 10 * (tmp_path / "blank.png").stat().st_size

"""The playground in headless Chromium: light, dark, wide and at a phone's width. Screenshots lie in pytest's folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.browser import Browser, open_browser
from tests.server.conftest import Server

INSTALLER = Path(__file__).parent / "install_chromium.sh"
BUTTON = "document.getElementById('send').textContent"
KINDS = "[...document.querySelectorAll('#log .answer span')].map(each => each.className)"
PROMPT = "one two three one two three"
SETTINGS = """
for (const [id, value] of Object.entries({"method": "%s", "k": "4", "max-tokens": "%d"}))
  document.getElementById(id).value = value;
document.getElementById("prompt").focus();
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if shutil.which("chromium") is None:
        done = subprocess.run(["sh", str(INSTALLER)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no chromium: {done.stderr.strip().splitlines()[-1:]}")
    with open_browser(shutil.which("chromium") or "chromium", tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def ask(browser: Browser, text: str, tokens: int, ready: str, method: str = "suffix") -> None:
    browser.evaluate(SETTINGS % (method, tokens))
    browser.type(text)
    browser.press("Enter", 13)
    browser.wait_for(f"{BUTTON} === 'Stop'")
    browser.wait_for(f"{BUTTON} === '{ready}'")


def answer_of(server: Server, tokens: int) -> str:
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": tokens}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"]


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
@pytest.mark.parametrize("dark", [False, True])
def test_chat_and_race(server: Server, browser: Browser, tmp_path: Path, width: int, height: int, dark: bool) -> None:
    known = answer_of(server, 60)  # an answer that was given before is drafted from
    browser.open(server.url, width=width, height=height, dark=dark)
    ask(browser, "hello hello hello hello", 150, "Send", method="ngram")
    assert "recovered" in browser.evaluate(KINDS)
    browser.evaluate("document.getElementById('clear').click()")
    ask(browser, PROMPT, 60, "Send")
    browser.screenshot(tmp_path / "chat.png")
    assert browser.evaluate("document.querySelector('#log .answer').textContent") == known
    kinds = browser.evaluate(KINDS)
    assert len(kinds) == 60  # one for each token
    assert {"drafted", "bonus"} <= set(kinds) <= {"drafted", "recovered", "bonus", "plain"}
    steps = len(kinds) - kinds.count("drafted")
    assert float(browser.evaluate("document.getElementById('tau').textContent")) == pytest.approx(
        len(kinds) / steps, abs=0.006
    )
    assert browser.evaluate("document.querySelectorAll('#positions .bar').length") == 4
    assert browser.evaluate("document.querySelectorAll('#steps rect').length") > 0

    browser.press("r", 82, alt=True)
    ask(browser, PROMPT, 40, "Race")
    browser.screenshot(tmp_path / "race.png")
    assert "the same 40 tokens" in browser.evaluate("document.getElementById('verdict').textContent")
    texts = browser.evaluate("[...document.querySelectorAll('.lane .answer')].map(each => each.textContent)")
    assert texts == [answer_of(server, 40)] * 2

    assert browser.evaluate("document.documentElement.scrollWidth") == width
    browser.evaluate("document.getElementById('model').textContent += ' · prompts and answers are kept'")
    assert browser.evaluate("(one => one.scrollWidth <= one.clientWidth)(document.getElementById('model'))")
    light = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] > 127")
    assert light != dark
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] > 127") == dark
    browser.evaluate("localStorage.clear()")
    assert browser.errors == []
    assert all(url.startswith((server.url, "about:")) for url in browser.urls)


def test_escape_stops_an_answer_and_a_bad_setting_is_said(server: Server, browser: Browser) -> None:
    browser.open(server.url)
    browser.evaluate(SETTINGS % ("suffix", 1900))
    browser.type("Go on")
    browser.press("Enter", 13)
    browser.wait_for("document.querySelectorAll('#log .answer span').length > 3")
    browser.press("Escape", 27)
    browser.wait_for(f"{BUTTON} === 'Send'")
    assert browser.evaluate("document.querySelector('#log .answer p').textContent") == "stopped"
    browser.evaluate("document.getElementById('temperature').value = -1")
    browser.type("Again")
    browser.press("Enter", 13)
    browser.wait_for("document.querySelector('#log .error') !== null")
    assert "temperature" in browser.evaluate("document.querySelector('#log .error').textContent")
    browser.errors.clear()  # the refused request

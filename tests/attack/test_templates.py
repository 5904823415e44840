"""Chat templates of hostile models: each is ended within its bounds, and the process that asks goes on."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.text.chat_template import ChatTemplate
from tests.helpers.hostile_templates import HOSTILE_TEMPLATES

CHAT = [{"role": "user", "content": "Hi"}]
GROUPS = 5
MOST_S = 5.0  # seconds until a template is ended, on a machine that is busy; 0.2 s otherwise
SHORT = ("round", "a shift by a float")  # end by themselves
GREETING = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")


@pytest.fixture
def _tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.text.chat_template.CPU_S", 0.1)
    monkeypatch.setattr("paceline.text.chat_template.MAX_TURNS", 50_000)
    monkeypatch.setattr("paceline.text.chat_template.MAX_BYTES", 300 << 20)


@pytest.mark.usefixtures("_tight")
@pytest.mark.parametrize("group", range(GROUPS))
def test_a_hostile_template_is_refused_and_named_within_its_bounds(group: int) -> None:
    for name, source in list(HOSTILE_TEMPLATES.items())[group::GROUPS]:
        began = time.monotonic()
        if name in SHORT:
            assert len(ChatTemplate(source).render(CHAT)) < 10
            continue
        with pytest.raises(PacelineError) as caught:
            ChatTemplate(source).render(CHAT)
        assert time.monotonic() - began < MOST_S, name
        assert "chat template" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert GREETING.render(CHAT) == "user: Hi"


@pytest.mark.usefixtures("_tight")
@pytest.mark.parametrize("name", ["a list that doubles", "center", "deep blocks", "a long sum"])
def test_the_variables_of_a_hostile_template_are_found_within_the_bounds_too(name: str) -> None:
    began = time.monotonic()
    with contextlib.suppress(PacelineError):
        assert "messages" not in ChatTemplate(HOSTILE_TEMPLATES[name]).variables
    assert time.monotonic() - began < MOST_S


def test_other_threads_go_on_while_a_template_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.text.chat_template.CPU_S", 0.3)
    hostile = ChatTemplate(HOSTILE_TEMPLATES["lists of lists that are compared"])
    refused: list[PacelineError] = []

    def render() -> None:
        try:
            hostile.render(CHAT)
        except PacelineError as error:
            refused.append(error)

    thread, turns = threading.Thread(target=render), 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.005)
        turns += 1
    assert refused
    assert turns > 10  # a comparison within this process would hold all threads


def test_sigterm_ends_a_process_that_waits_for_a_template() -> None:
    source = HOSTILE_TEMPLATES["lists of lists that are compared"]
    program = (
        "from paceline.text.chat_template import ChatTemplate\n"
        "print('waits', flush=True)\n"
        f"ChatTemplate({source!r}).render({CHAT!r})\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(timeout=30) == -signal.SIGTERM
        assert time.monotonic() - began < 2


def test_the_process_of_templates_has_no_torch_and_is_started_once(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the current folder was run')")
    program = (
        "import sys\n"
        "sys.path.remove('')\n"
        "import subprocess\n"
        "started = []\n"
        "begin = subprocess.Popen.__init__\n"
        "def note(self, *args, **options):\n"
        "    started.append(args)\n"
        "    begin(self, *args, **options)\n"
        "subprocess.Popen.__init__ = note\n"
        "from paceline.text.chat_template import ChatTemplate\n"
        f"texts = [ChatTemplate('a{{{{ messages[0].content }}}}').render({CHAT!r}) for _ in range(3)]\n"
        "print(texts, len(started), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "['aHi', 'aHi', 'aHi'] 1 False\n", done.stderr

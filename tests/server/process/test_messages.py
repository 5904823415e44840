"""Every command and event of the socket is read as it was written."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from paceline.config import EngineConfig, SpeculationConfig
from paceline.core.sequence import Owner
from paceline.engine.events import Accepted, Call, Cancel, Delta, Ended, Failed, FinishedAnswer, Request, Submit
from paceline.errors import EngineDied, InvalidParameter, PacelineError, QueueFull
from paceline.outputs import SpeculationStats
from paceline.sampling_params import SamplingParams
from paceline.server.process.messages import (
    EngineSettings,
    Gauges,
    LoadFailed,
    Ready,
    Relearn,
    decode_commands,
    decode_events,
    decode_settings,
    encode_command,
    encode_events,
    encode_settings,
    join_commands,
)

LOGPROBS = [{7: [-0.5, 2], 9: [-0.25, 1]}]
STATS = SpeculationStats(num_drafts=2, drafted_per_position=[2, 1], drafts_by_method={"suffix": 2}, spent_s=0.5)


def test_commands_of_one_message_keep_their_order() -> None:
    params = SamplingParams(
        temperature=0.5,
        stop=("a", "b"),
        logit_bias={3: -1.0},
        seed=2**62,
        structured_outputs={"json": {"type": "object"}},
    )
    commands = [
        Submit([Request("r", [1, 2], params, "group", streamed=True, owner=Owner("one 5f", "one", lasts=False))]),
        Cancel(["r", "s"]),
        Relearn("suffix"),
    ]
    assert decode_commands(join_commands([*map(encode_command, commands)])) == commands
    with pytest.raises(ValueError, match="Call"):
        encode_command(Call(id, None))  # type: ignore[arg-type]


def test_events_of_one_message_keep_their_order() -> None:
    answer = FinishedAnswer(1, [7], "text", "stop", "end", LOGPROBS, STATS)  # type: ignore[arg-type]
    events = [
        Accepted("r"),
        Delta("r", 1, [7], [0], "text", None, LOGPROBS, ["suffix", 4, 3]),  # type: ignore[arg-type]
        Ended("r", [answer, answer], 1.0, 2.0, 3, LOGPROBS),  # type: ignore[arg-type]
        Gauges(1, 2, 0.5, 3, 4, 0.25, None, {"suffix": "failed"}),
        Ready({"pid": 1}),
        LoadFailed("no such model"),
    ]
    assert decode_events(encode_events(events)) == events
    assert decode_events(encode_events([Accepted("r", [object()])])) == [Accepted("r")]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "error", [InvalidParameter("seed", "is odd"), QueueFull("full"), EngineDied("gone"), PacelineError("no")]
)
def test_an_error_keeps_its_class_message_and_field(error: PacelineError) -> None:
    (failed,) = decode_events(encode_events([Failed("r", error)]))
    assert isinstance(failed, Failed)
    assert type(failed.error) is type(error)
    assert str(failed.error) == str(error)
    assert getattr(failed.error, "field", None) == getattr(error, "field", None)


def test_settings_of_a_worker() -> None:
    settings = EngineSettings(
        "smollm2", {"threads": 2}, EngineConfig(max_num_seqs=8), SpeculationConfig(method="auto", drafter=("a",))
    )
    assert asdict(decode_settings(encode_settings(settings))) == asdict(settings)

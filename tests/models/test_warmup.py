"""Nothing that decoding meets is new to it: buckets of steps with drafts are among those warmed up."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.models.buckets import STEPS, TILES, Bucket, path_up, up
from paceline.models.warmup import TREES, PassShape, drafting, verifying, warmup_pass
from paceline.platform.triton import parallel_compile

attention = pytest.importorskip("paceline.models.backends.cuda.attention.attention", reason="needs triton")


def bucket(counts: list[int], group: int, logits: int | None = None, path: int = 0) -> Bucket:
    tile, begin, _ = attention.tiles_of(np.arange(len(counts)).repeat(counts), group)
    rows = sum(counts)
    wanted = 0 if logits in (None, rows) else up(max(logits, 1))
    return Bucket(up(rows), up(len(begin), TILES), tile, path_up(path), wanted, ())


def warmed_up(shapes: list[PassShape], group: int) -> set[Bucket]:
    found = set()
    for shape in shapes:
        _, plan, logit_rows = warmup_pass(shape, 16)
        found.add(bucket(list(shape.counts), group, len(logit_rows), plan.path.shape[1]))
    return found


@pytest.mark.parametrize(("sequences", "most_rows", "group"), [(1, 512, 4), (48, 512, 4), (128, 2048, 4), (64, 512, 3)])
def test_every_batch_with_drafts_is_warmed_up(sequences: int, most_rows: int, group: int) -> None:
    draw, known = random.Random(0), warmed_up(list(verifying(sequences, most_rows, 16)), group)
    for count in range(1, sequences + 1):
        for _ in range(20):
            most = draw.choice([1, 2, 5, 16, 17])
            counts = [draw.randint(1, most) for _ in range(count)]
            if sum(counts) <= most_rows:
                assert bucket(counts, group) in known
                if count < sum(counts) <= TREES:
                    assert bucket(counts, group, path=draw.randint(1, 16)) in known


def test_every_pass_of_a_draft_model_is_warmed_up() -> None:
    draw, known = random.Random(0), warmed_up(list(drafting(128, 2048)), 3)
    for count in range(1, 129):
        assert bucket([1] * count, 3) in known
        for most in (2, 2, 4, 8):
            counts = [draw.randint(1, most) for _ in range(count)]
            assert bucket(counts, 3, count) in known
    assert len(known) < 130


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize(("sequences", "most_rows"), [(1, 256), (64, 256), (64, 512), (64, 2048), (128, 2048), (8, 8)])
def test_a_long_prompt_that_fills_passes_alone_or_beside_decodes_is_warmed_up(
    sequences: int, most_rows: int, group: int
) -> None:
    known = warmed_up(list(verifying(sequences, most_rows, 0)), group)
    for decodes in (*range(min(sequences, most_rows, 64)), *range(64, sequences, 8)):
        assert bucket([1] * decodes + [most_rows - decodes], group, decodes) in known


def test_plain_decoding_asks_for_few_shapes_and_drafts_for_not_too_many() -> None:
    assert len(warmed_up(list(verifying(64, 512, 0)), 4)) < 40
    assert len(warmed_up(list(verifying(128, 2048, 16)), 4)) < 225


def test_rows_beyond_the_largest_bucket_are_padded_in_steps() -> None:
    assert [up(STEPS[-1]), up(STEPS[-1] + 1), up(0)] == [STEPS[-1], STEPS[-1] + 512, 0]


def test_kernels_are_compiled_side_by_side_and_none_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    launches = []

    def run(self: object, *args: object, warmup: bool, **kwargs: object) -> None:
        launches.append((self, args, warmup, kwargs))

    monkeypatch.setattr(jit.JITFunction, "run", run)
    kernel = jit.JITFunction(warmup_pass)
    with parallel_compile():
        kernel[(2,)](1, BLOCK=3)
    kernel[(2,)](1, BLOCK=3)
    assert [(args, warmup, kwargs) for _, args, warmup, kwargs in launches] == [
        ((1,), True, {"grid": (2,), "BLOCK": 3}),
        ((1,), False, {"grid": (2,), "BLOCK": 3}),
    ]

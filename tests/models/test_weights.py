"""Codes beside their scales stand for the numbers that a plain loop gives."""

from __future__ import annotations

import pytest
import torch

from paceline.models.kernels import kernels_for
from paceline.models.weights import StoredWeight, WeightKind, alike, in_one_kind, joined

CPU = torch.device("cpu")


def codes_of(kind: WeightKind, rows: int, columns: int, group: int, shift: str, seed: int = 0) -> StoredWeight:
    """A random weight of codes; `shift`: none, zeros or offsets."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    groups = rows, columns // group
    scales = (torch.rand(groups, generator=generator) + 0.5).to(torch.float16) / 64
    if kind is WeightKind.FP8:
        values = torch.randn(rows, columns, generator=generator)
        return StoredWeight.of_codes(kind, values.to(torch.float8_e4m3fn), scales[:, :1])
    low, high = (0, 16) if kind is WeightKind.INT4 else (-128, 128)
    data = (
        ints(0, 256, rows, columns // 2).to(torch.uint8) if kind is WeightKind.INT4 else ints(low, high, rows, columns)
    )
    return StoredWeight.of_codes(
        kind,
        data.to(kind.dtype),
        scales,
        zeros=ints(low, high, *groups) if shift == "zeros" else None,
        offsets=torch.randn(groups, generator=generator) if shift == "offsets" else None,
    )


@pytest.mark.parametrize("shift", ["none", "zeros", "offsets"])
@pytest.mark.parametrize("kind", [WeightKind.INT8, WeightKind.INT4])
def test_codes_of_groups_expand_to_the_numbers_of_a_plain_loop(kind: WeightKind, shift: str) -> None:
    weight = codes_of(kind, 3, 64, 32, shift)
    assert weight.scales is not None
    numbers = weight.numbers()
    assert numbers.dtype == torch.float32
    assert numbers.shape == weight.shape == (3, 64)
    for row in range(3):
        for column in range(64):
            group = column // 32
            if kind is WeightKind.INT4:
                code = int(weight.data[row, column // 2]) >> 4 * (column % 2) & 15
            else:
                code = int(weight.data[row, column])
            scale = float(weight.scales[row, group])
            if weight.offsets is not None:
                expected = torch.tensor(code * scale).float() + weight.offsets[row, group]
            else:
                zero = int(weight.zeros[row, group]) if weight.zeros is not None else 8 * (kind is WeightKind.INT4)
                expected = torch.tensor((code - zero) * scale).float()
            assert numbers[row, column] == expected


def test_an_fp8_scale_is_of_the_tensor_or_of_each_row() -> None:
    codes = torch.tensor([[1.0, -2.0], [448.0, 0.0]]).to(torch.float8_e4m3fn)
    one = StoredWeight.of_codes(WeightKind.FP8, codes, torch.tensor(0.5))
    rows = StoredWeight.of_codes(WeightKind.FP8, codes, torch.tensor([0.5, 2.0]))
    assert one.numbers().tolist() == [[0.5, -1.0], [224.0, 0.0]]
    assert rows.numbers().tolist() == [[0.5, -1.0], [896.0, 0.0]]
    both = joined([one, rows])
    assert both.numbers().tolist() == [[0.5, -1.0], [224.0, 0.0], [0.5, -1.0], [896.0, 0.0]]
    assert both.nbytes == 8 + 16


def test_codes_are_joined_where_their_groups_are_alike_and_expanded_where_kernels_read_numbers() -> None:
    first, second = (codes_of(WeightKind.INT4, 2, 64, 32, "zeros", seed) for seed in (1, 2))
    other = codes_of(WeightKind.INT4, 2, 64, 64, "zeros", 3)
    assert alike([first, second])
    assert not alike([first, other])
    numbers = torch.cat([first.numbers(), second.numbers()])
    assert torch.equal(joined([first, second]).numbers(), numbers)
    expanded = in_one_kind([first, second, other])
    assert expanded.kind is WeightKind.FLOAT32
    assert torch.equal(expanded.data, torch.cat([numbers, other.numbers()]))


def test_a_cpu_computes_with_the_numbers_that_codes_stand_for() -> None:
    kernels, x = kernels_for(CPU), torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    for kind in (WeightKind.FP8, WeightKind.INT8, WeightKind.INT4):
        weight = codes_of(kind, 8, 64, 32, "none")
        given = kernels.linear(x, kernels.pack(weight))
        assert torch.equal(given, kernels.linear(x, kernels.pack(weight.numbers())))
        assert torch.equal(kernels.embedding(weight, None)[torch.tensor([5])][0], weight.numbers()[5])

"""`--numerics fast` on a GPU: passes of many rows use the vendor's products, which choose their own order of sums.

Up to 64 rows our products, which read weights as fast as memory allows, are still used. Beyond, a row's bits depend on
the size of its pass: lossless in distribution, but a near-tie may resolve differently in a prefill than in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from paceline.models.kernels import Layer, LayerByLayer, Shape, Stack
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan
from paceline.models.triton.linear import FEW_ROWS
from paceline.models.triton_kernels import TritonKernels
from paceline.models.weights import Linear


class FastKernels(TritonKernels):
    name = "triton, fast"
    exact = False

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        if len(x) <= FEW_ROWS or weight.weight.kind.has_scales:
            return super().linear(x, weight)
        return F.linear(x, weight.weight.data, weight.bias)

    def logits(self, x: Tensor, weight: Linear, out: Tensor | None = None) -> Tensor:
        if len(x) <= FEW_ROWS or weight.weight.kind.has_scales:
            return super().logits(x, weight, out)
        logits = self.linear(x, weight).float()
        return logits if out is None else out.copy_(logits)

    def stack(self, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: Shape) -> Stack:
        return _Stack(super().stack(layers, caches, shape), LayerByLayer(self, layers, caches, shape))


class _Stack:
    def __init__(self, few: Stack, many: Stack) -> None:
        self.caches, self._few, self._many = few.caches, few, many

    def run(self, first: int, last: int, added: Tensor | None, residual: Tensor, plan: PassPlan) -> Tensor:
        stack = self._few if len(residual) <= FEW_ROWS else self._many
        return stack.run(first, last, added, residual, plan)

"""What the engine has done so far, and what share of the time was not the model's."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engine.batch import Batch


@dataclass
class EngineStats:
    num_steps: int = 0
    num_pass_tokens: int = 0  # rows of target passes, drafted nodes at their budget
    num_committed_tokens: int = 0
    step_s: float = 0.0
    model_s: float = 0.0
    captured_late: int = 0  # passes captured and sampling kernels compiled after start-up: steps waited for them

    @property
    def overhead_s(self) -> float:
        """Everything but the model, over all steps."""
        return self.step_s - self.model_s

    def add(self, batch: Batch, *, committed: int, model_s: float, step_s: float) -> None:
        self.num_steps += 1
        self.num_pass_tokens += batch.num_tokens
        self.num_committed_tokens += committed
        self.step_s += step_s
        self.model_s += model_s

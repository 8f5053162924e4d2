"""Steps whose loss or gradients are NaN or infinite: what is logged of them, and whether they are
taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from adaptive_batch.errors import NonfiniteLossError
from adaptive_batch.schedules import Progress

from .step import Step
from .step_result import StepResult

ON_NONFINITE_LOSS = ("warn", "stop", "skip")


def norm_to_clip(max_grad_norm: float | None, on_nonfinite_loss: str) -> float | None:
    """Return what to clip the gradients' norm to; infinity where it is only measured."""
    if max_grad_norm is None and on_nonfinite_loss != "warn":
        return math.inf
    return max_grad_norm


class NonfiniteSteps:
    """Looks at each step before the optimizer takes it.

    Args:
        policy: ``warn`` looks at the loss, and the step is taken; ``skip`` and ``stop`` look at the
            norm of the gradients too, where the step measures it, and drop the gradients;
            ``stop`` raises.
        step: runs the steps, whose gradients are dropped.
        event: takes each step that is not finite: a kind, a message and facts by name; of several
            in a row, the first and each hundredth are printed.
        is_taken: the optimizer in backward has taken a step by then.
        remedy: returns what can be done after ``stop``.
    """

    def __init__(
        self,
        policy: str,
        step: Step,
        *,
        event: Callable[..., object],
        is_taken: bool = False,
        remedy: Callable[[], str] | None = None,
    ) -> None:
        self._policy = policy
        self._step = step
        self._event = event
        self._remedy = remedy
        self._is_taken = is_taken
        self._num_in_a_row = self._num_since_counted = 0
        # The last step that was finite: its number, loss and learning rate.
        self._last_finite: tuple[int, float, float] | None = None
        self._facts: dict[str, object] = {}
        self._changes: dict[str, str] = {}

    def drops(self, result: StepResult, progress: Progress, *, lr: float) -> bool:
        """Return whether a step is not to be taken: its gradients are gone.

        Args:
            result: of the step, the same on all ranks.
            progress: progress before it, with the batch that was requested for it.
            lr: its learning rate.

        Raises:
            NonfiniteLossError: the policy is ``stop``.
        """
        step = progress.steps + 1
        # What may have changed before it; the last change of each is named.
        facts = {
            "epoch": progress.epoch,
            "batch": progress.batch,
            "micro_batch": self._step.sizer.limit_of_step,
        }
        for name, now in facts.items():
            previous = self._facts.get(name, now)
            if previous != now:
                self._changes[name] = f"{name} {previous} -> {now} at step {step}"
        self._facts = facts
        wrong = self._wrong(result)
        if wrong is None:
            self._num_in_a_row = 0
            self._last_finite = (step, result.loss, lr)
            return False
        self._num_in_a_row += 1
        self._num_since_counted += 1
        changes = "".join(f"; {change}" for change in self._changes.values())
        in_a_row = ""
        if self._num_in_a_row > 1:
            in_a_row = f" ({self._num_in_a_row} steps in a row)"
        message = f"step {step}: {wrong}{in_a_row}, lr {lr:g}{self._before()}{changes}"
        skips = self._policy == "skip"
        if skips:
            what_next = "it is skipped: weights and optimizer stay as they are"
        elif self._is_taken:
            what_next = "on_nonfinite_loss=stop would end training"
        else:
            what_next = "on_nonfinite_loss=skip or stop would not take it"
        self._event(
            "nonfinite_loss",
            f"{message}; {what_next}",
            prints=(self._num_in_a_row == 1 or self._num_in_a_row % 100 == 0)
            and self._policy != "stop",
            step=step,
            loss=result.loss,
            skipped=skips,
        )
        if self._policy == "warn":
            return False
        self._step.drop_gradients()
        if self._policy == "stop":
            state = " before this step is taken"
            if self._is_taken:
                state = "; the weights have been stepped by it"
            remedy = f"; {self._remedy()}" if self._remedy else ""
            raise NonfiniteLossError(
                f"{message}; on_nonfinite_loss=stop ends training{state}{remedy}"
            )
        return True

    def count(self) -> int:
        """Return the steps that were not finite since this was asked last."""
        count = self._num_since_counted
        self._num_since_counted = 0
        return count

    def state_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return {"since_counted": self._num_since_counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from a saved state."""
        self._num_since_counted = state["since_counted"]

    def _before(self) -> str:
        """Return how a message goes on about the last step that was finite."""
        if self._last_finite is None:
            return ""
        step, loss, lr = self._last_finite
        return f"; step {step} had loss {loss:.4g} and lr {lr:g}"

    def _wrong(self, result: StepResult) -> str | None:
        if not math.isfinite(result.loss):
            return f"the loss is {result.loss}"
        if self._policy != "warn" and not result.is_finite:
            # The loss is finite, so the norm is there and is not.
            assert result.grad_norm is not None
            return f"the norm of the gradients is {float(result.grad_norm)}"
        return None

"""Whether the optimizer has yet to take the step that ran last."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer


class PendingStep:
    """A step that has run, until the optimizer has taken it.

    Args:
        model: model whose gradients a step leaves.
        optimizer: optimizer that takes it; of one without hooks it is not known whether it has.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._is_pending = False
        self._sees_steps = False
        # Some of torchao's optimizers have no hooks, nor has accelerate's wrapper of one.
        with suppress(AttributeError):
            optimizer.register_step_post_hook(self._take)
            self._sees_steps = True

    def _take(self, *_: Any) -> None:
        self._is_pending = False

    def ran(self) -> None:
        """Note that a step has left its gradients."""
        self._is_pending = self._sees_steps

    def check_taken(self) -> None:
        """Refuse to save between a step and the optimizer's.

        Raises:
            ValueError: the gradients of the last step wait for ``optimizer.step()``.
        """
        # A step that a GradScaler skips has no gradients any more.
        if not self._is_pending:
            return
        if any(parameter.grad is not None for parameter in self._model.parameters()):
            raise ValueError(
                "the gradients of the last run() wait for optimizer.step(), and a run that resumes"
                " here would lose that step; save after optimizer.step()"
            )

"""The loss over each full batch of samples, so that runs whose batch changes can be laid beside
each other.
"""

from __future__ import annotations

from typing import Any


class FullBatchLoss:
    """Averages the loss over label tokens until a full batch of rows has gone by, however many
    steps that takes.

    Steps are not cut: an average begins with the step after the last average and ends with the
    first step that makes it full, so where steps do not divide the full batch it covers up to a
    step more.

    Args:
        rows: of a full batch, over all ranks.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._seen = 0
        self._loss_sum = 0.0
        self._label_tokens = 0.0

    def add(self, loss: float, *, label_tokens: float, rows: int) -> float | None:
        """Count a step.

        Args:
            loss: mean over its label tokens.
            label_tokens: how many.
            rows: of the step, over all ranks.

        Returns:
            The mean over the label tokens of a full batch, where this step makes one full; else
            None. A step that is a full batch of its own gives its own loss, to the bit.
        """
        if self._seen == 0 and rows >= self.rows:
            return loss
        self._seen += rows
        self._loss_sum += loss * label_tokens
        self._label_tokens += label_tokens
        if self._seen < self.rows:
            return None
        mean = 0.0
        if self._label_tokens:
            mean = self._loss_sum / self._label_tokens
        self._seen = 0
        self._loss_sum = 0.0
        self._label_tokens = 0.0
        return mean

    def state_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return {
            "rows": self.rows,
            "seen": self._seen,
            "loss_sum": self._loss_sum,
            "label_tokens": self._label_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, with its number of rows."""
        self.rows = state["rows"]
        self._seen = state["seen"]
        self._loss_sum = state["loss_sum"]
        self._label_tokens = state["label_tokens"]

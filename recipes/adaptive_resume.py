"""Where a run goes on: from the newest whole checkpoint, of a step or an epoch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from adaptive_checkpoint import STATE_KEY, EpochCheckpoints
from omegaconf import DictConfig
from torchtune import training

from adaptive_batch.errors import CheckpointError
from adaptive_batch.resume import ResumePoint, ResumePoints, newest_whole
from adaptive_batch.settings import Settings

log = logging.getLogger("adaptive_batch")


class Checkpoints:
    """Epoch checkpoints and resume points of a run.

    Args:
        cfg: the configuration.
        settings: the same, checked.

    Attributes:
        recipe_state: what was saved; None unless resuming.
        passed_over: a line for each resume point that was newer and could not be used.
        on_failure: is told of a resume point that failed in the background while training went on; logs a warning unless set.

    Raises:
        CheckpointError: resuming, and nothing whole is there.
    """

    def __init__(self, cfg: DictConfig, settings: Settings) -> None:
        self._points = ResumePoints(
            Path(cfg.output_dir), keep_last=settings.keep_last_n_checkpoints, asynchronous=settings.saves_asynchronously
        )
        self.on_failure: Callable[[CheckpointError], object] = _warn
        self._point: ResumePoint | None = None
        self.passed_over: list[str] = []
        self.holds_earlier_run = False
        self.recipe_state: dict[str, Any] | None = None
        self.source = ""
        if not cfg.resume_from_checkpoint:
            folder = Path(cfg.output_dir)
            self.holds_earlier_run = (folder / "recipe_state").exists() or any(folder.glob("step_*/resume.json"))
            self._epochs = EpochCheckpoints(cfg.checkpointer, resume=False)
            return
        point, passed_over = newest_whole(Path(cfg.output_dir))
        self.passed_over = [passed.describe() for passed in passed_over]
        try:
            self._epochs = EpochCheckpoints(cfg.checkpointer, resume=True)
        except CheckpointError as error:
            has_epoch = (Path(cfg.checkpointer.output_dir) / "recipe_state").exists()
            if point is None:
                raise CheckpointError(self._nothing_whole(cfg.output_dir, str(error) if has_epoch else "")) from error
            if has_epoch:
                self.passed_over.append(str(error))
            self._epochs = EpochCheckpoints(cfg.checkpointer, resume=False)
        if point is None or self._is_newer(self._epochs, point):
            self.recipe_state = self._epochs.recipe_state
            self.source = self._epochs.source
            return
        if self._epochs.recipe_state is not None:
            self._epochs = EpochCheckpoints(cfg.checkpointer, resume=False)
        self._point = point
        self.recipe_state = point.load_small_state()
        self.source = str(point.path)

    @staticmethod
    def _is_newer(epochs: EpochCheckpoints, point: ResumePoint) -> bool:
        """Whether the last epoch was saved after the resume point; of one run, by its steps, whatever the clock said.

        Where an epoch was begun anew, steps were counted anew.
        """
        if epochs.recipe_state is None:
            return False
        ours, theirs = epochs.recipe_state.get(STATE_KEY, {}), point.load_small_state()[STATE_KEY]
        if ours.get("run") == theirs["run"]:
            steps, others = ((state["begun_anew"], state["progress"]["steps"]) for state in (ours, theirs))
            return bool(steps >= others)
        return epochs.order > point.order

    def _nothing_whole(self, folder: str, epoch: str) -> str:
        """Why there is nothing to go on from; `epoch` is what is wrong with the last epoch, if there is one."""
        reasons = [*filter(None, [epoch]), *self.passed_over]
        if len(reasons) == 1 and epoch:
            return epoch
        if reasons:
            return "\n".join(
                [
                    f"{folder} holds nothing whole to go on from; restore one of these, or give another output_dir:",
                    *reasons,
                ]
            )
        if any(Path(folder).glob("epoch_*")):
            return (
                f"{folder} holds the weights of a run that is done, and nothing to go on from: the last epoch is saved without "
                "its recipe_state; train on from its weights with another output_dir and resume_from_checkpoint=False"
            )
        return (
            f"{folder} holds nothing to go on from: no resume point (step_N), and no recipe_state of an epoch; check output_dir, "
            "or set resume_from_checkpoint=False to begin, as for a run that was ended before its first save"
        )

    def load_weights(self) -> Mapping[str, Any]:
        """The model's state dict, in torchtune's naming; the optimizer's comes into :attr:`recipe_state`."""
        weights: Mapping[str, Any] = self._epochs.load_weights()
        if self._point is None:
            return weights
        del weights  # of the base: torchtune's checkpointer learns from reading them how to save
        assert self.recipe_state is not None
        tensors, _ = self._point.load()
        self.recipe_state[training.OPT_KEY] = tensors["optimizer"]
        model: Mapping[str, Any] = tensors["model"]
        return model

    def save_epoch(self, model_state: Mapping[str, Any], *, recipe_state: Mapping[str, Any] | None, epoch: int) -> None:
        """Save an epoch, once a resume point that is being written is whole or has failed.

        Raises:
            CheckpointError: saving failed; what was saved before is untouched.
        """
        self._settle()
        self._epochs.save(model_state, recipe_state=recipe_state, epoch=epoch)

    def mark_preempted(self, epoch: int) -> None:
        """Say of an epoch that is saved that its run was asked to end."""
        self._epochs.mark_preempted(epoch)

    def save_step(
        self, step: int, *, model_state: Mapping[str, Any], optimizer_state: Mapping[str, Any], state: Mapping[str, Any]
    ) -> float:
        """Save a resume point; returns the seconds that training stood still.

        Raises:
            CheckpointError: saving failed, unless it goes on in the background; what was saved before is untouched.
        """
        start = time.perf_counter()
        self._settle()
        self._points.save(step, {"model": model_state, "optimizer": optimizer_state}, dict(state))
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait for a resume point that is being written.

        Raises:
            CheckpointError: it failed.
        """
        self._points.wait()

    def close(self) -> None:
        """Wait, and take no more.

        Raises:
            CheckpointError: the last one failed.
        """
        self._points.close()

    def _settle(self) -> None:
        """Wait for a resume point that is being written in the background; that it failed is said, and no more."""
        try:
            self._points.wait()
        except CheckpointError as error:
            self.on_failure(error)


def _warn(error: CheckpointError) -> None:
    log.warning("training goes on without a resume point: %s", error)

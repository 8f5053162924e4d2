"""What a checkpoint brings to the run that resumes from it."""

from __future__ import annotations

import uuid
from typing import Any

import torch
from torchtune import training

from adaptive_batch import distributed
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState
from adaptive_batch.schedules import Progress

from .checkpoints import Checkpoints
from .epoch_checkpoints import STATE_KEY
from .parts import TrainingParts
from .ranks import check_fewer_ranks
from .resume_policy import compare, run_conditions


class ResumedRun:
    """The state of the run that a checkpoint belongs to, held against the configuration of this one.

    Args:
        parts: of this run, with their data built; counts batches on the ranks that the run began with.
        checkpoints: of this run.
        seed: that is configured.

    Attributes:
        saved: the state of each part by name; empty for a new run, or for a checkpoint of torchtune's own recipe.
        progress: where training begins.
        name: of the run.
        seed: of the run.
        max_steps_per_epoch: of the run.
        conditions: what results depend on now.
        differs: those of them that the checkpoint was not trained with.
        ignored: settings without effect as the checkpoint's are kept, each with its value and that of the checkpoint.
        epochs: of the checkpoint; None without one.
        begins_epoch_again: which rows are left of the epoch is not known, so that it begins again.
        times_begun_again: how often that has happened.
        unlabelled: steps of the epoch so far that had no label.
        keeps_batch: the batch size of the checkpoint is kept.

    Raises:
        SettingError: the configuration is of another run.
    """

    def __init__(self, parts: TrainingParts, checkpoints: Checkpoints, *, seed: int) -> None:
        settings, state = parts.settings, checkpoints.found.recipe_state
        self._device = parts.device
        self._restores = settings.restores_random_state
        self.saved: dict[str, Any] = {} if state is None else state.get(STATE_KEY, {})
        if self.saved:  # batches are counted as they were, whatever the number of ranks is now
            parts.ranks = self.saved["steps"]["ranks"]
        check_fewer_ranks(settings, began_on=parts.ranks)
        self.conditions = run_conditions(parts)
        self.progress = Progress()
        self.name = uuid.uuid4().hex[:12]
        self.seed, self.max_steps_per_epoch = seed, settings.max_steps_per_epoch
        self.differs: list[str] = []
        self.ignored: dict[str, tuple[Any, Any]] = {}
        self.epochs: int | None = None
        self.begins_epoch_again = self.keeps_batch = False
        self.times_begun_again = self.unlabelled = 0
        if state is None:
            return
        self.epochs = state[training.TOTAL_EPOCHS_KEY]
        self.progress = Progress(epoch=state[training.EPOCHS_KEY])
        for name, key in (("seed", training.SEED_KEY), ("max_steps_per_epoch", training.MAX_STEPS_KEY)):
            if (configured := getattr(self, name)) != state[key]:
                self.ignored[name] = configured, state[key]
                setattr(self, name, state[key])
        if self.saved:
            self._check_optimizer(parts)
            self.name, self.unlabelled = self.saved["run"], self.saved["unlabelled"]
            self.progress = Progress(**self.saved["progress"])
            self.times_begun_again = self.saved["times_begun_again"]
        self._compare(parts)

    def _check_optimizer(self, parts: TrainingParts) -> None:
        now = {
            "optimizer._component_": str(parts.cfg.optimizer._component_),
            "optimizer_in_bwd": parts.settings.optimizer_in_bwd,
        }
        for key, value in now.items():
            if (before := self.saved["optimizer"][key]) != value:
                remedy = f"the optimizer's state in the checkpoint was saved with {before}; resume with that"
                raise SettingError(key, value, remedy)

    def _compare(self, parts: TrainingParts) -> None:
        settings = parts.settings
        before = self.saved.get("conditions", {})
        self.differs, self.begins_epoch_again = compare(
            before,
            self.conditions,
            allowed=settings.resume_allow_changes,
            in_mid_epoch=self.progress.epoch_steps > 0,
        )
        if self.begins_epoch_again:
            self.times_begun_again += 1
            self.progress, self.unlabelled = self.progress.at_epoch_start(), 0
        if self.saved and settings.batch_changes:
            # a batch that was found or grown is kept; one that now is to be found for the first time is found
            found_before = before["use_maximum_batch_size"] or not settings.use_maximum_batch_size
            knows_bound = self.saved["limits"]["bound"] is not None or settings.grow_beyond_maximum
            self.keeps_batch = found_before and knows_bound

    def state_of_steps(self, *, configured_batch_size: int, follows_schedule: bool) -> dict[str, Any]:
        """Return the state of the step planner, with a batch that is not kept as it is configured."""
        state: dict[str, Any] = dict(self.saved["steps"])
        if not self.keeps_batch:
            state |= {"first_batch_size": None, "grown_in": -1}
            if not follows_schedule:
                state["batch_size"] = configured_batch_size
        return state

    def restore_random_state(self, progress: Progress) -> None:
        """Take up the random numbers of the checkpoint, after everything that building and searching drew."""
        if not self.saved or not (self._restores or self.saved.get("preempted") or progress.epoch_steps):
            return
        states: list[dict[str, torch.Tensor]] = self.saved["random_states"]
        if len(states) == distributed.world_size():
            RandomState(self._device).load_state_dict(states[distributed.rank()])
        else:  # no rank's is another's
            training.set_seed(seed=self.seed + progress.steps)

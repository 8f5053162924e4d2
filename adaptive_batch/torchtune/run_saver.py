"""When a run is saved, and what of it besides weights and optimizer."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.distributed.checkpoint.stateful import Stateful
from torchtune import training

from adaptive_batch import distributed
from adaptive_batch.data import Batches
from adaptive_batch.distributed import EXIT_STATUS, Preemption
from adaptive_batch.errors import CheckpointError
from adaptive_batch.memory import RandomState

from .checkpoints import Checkpoints
from .epoch_checkpoints import STATE_KEY
from .job import Job
from .log import TrainingLog
from .resumed_run import ResumedRun
from .trainer import Trainer

Part = TypeVar("Part", bound=Stateful)


class RunSaver:
    """Saves a run after its epochs, every so many steps, and where it is asked to end.

    Args:
        job: what is trained.
        checkpoints: writes the files.
        resumed: the state that the run began with.
        batches: where training is.
        log: is told of each save.
        preemption: whether this process is asked to end.
    """

    def __init__(
        self,
        job: Job,
        checkpoints: Checkpoints,
        resumed: ResumedRun,
        batches: Batches,
        log: TrainingLog,
        preemption: Preemption,
    ) -> None:
        self._job = job
        self._settings = job.settings
        self._checkpoints = checkpoints
        self._resumed = resumed
        self._batches = batches
        self._log = log
        self._preemption = preemption
        # By the name that a checkpoint keeps their state under.
        self._parts: dict[str, Any] = {}

    def add(self, name: str, part: Part) -> Part:
        """Save a part under a name from now on, and load what the checkpoint holds of it."""
        self.keep(name, part)
        state = self._resumed.state_of(name)
        if state is not None:
            part.load_state_dict(state)
        return part

    def keep(self, name: str, part: Part) -> Part:
        """Save a part under a name from now on, which has loaded its state."""
        self._parts[name] = part
        return part

    def save_epoch(self, trainer: Trainer, *, epoch: int) -> None:
        """Save weights and all that resuming needs, unless training is done and that is not asked
        for; end here if the process is asked to end.
        """
        is_last = epoch + 1 >= self._settings.epochs
        ends = distributed.any_of_ranks(self._preemption.requested)
        state = None
        if not is_last or self._settings.saving.keep_final_state:
            state = self._state(preempted=ends and not is_last)
        if distributed.any_of_ranks(not trainer.is_finite()):
            message = (
                f"weights are nan or infinite after epoch {epoch}: what is saved is of no use;"
                " lower optimizer.lr, or set on_nonfinite_loss=stop"
            )
            self._log.event("nonfinite_weights", message, epoch=epoch)
        self._log.sync()
        self._checkpoints.save_epoch(trainer, recipe_state=state, epoch=epoch, ends_run=is_last)
        self._log.event(
            "checkpoint", f"epoch {epoch} saved", epoch=epoch, steps=self._batches.progress.steps
        )
        if distributed.any_of_ranks(self._preemption.requested) and not is_last:
            self._checkpoints.mark_preempted(epoch)
            self._checkpoints.wait()
            self._end_early()

    def save_where_due(self, trainer: Trainer, *, ends: bool) -> None:
        """Save a resume point every so many steps, and where the process is asked to end.

        Args:
            trainer: what is saved.
            ends: whether all of several ranks know that one of them is asked to end.
        """
        every = self._settings.saving.save_every_n_steps
        step = self._batches.progress.steps
        if distributed.world_size() == 1:
            ends = self._preemption.requested
        if not (ends or (every and step % every == 0)):
            return
        self._log.sync()
        try:
            seconds = self._checkpoints.save_step(step, trainer, state=self._state())
            if ends:
                self._checkpoints.wait()
        except CheckpointError as error:
            if ends:
                raise
            self._log.failed_save(error)
            return
        message = f"step {step}: resume point, training stood still for {seconds:.2f} s"
        self._log.event(
            "resume_point", message, step=step, path=f"step_{step}", seconds=round(seconds, 4)
        )
        if ends:
            self._end_early()

    def _end_early(self) -> None:
        step = self._batches.progress.steps
        resumes = distributed.on_rank_zero(self._checkpoints.after_end)
        message = f"asked to end: saved at step {step}; {resumes}"
        self._log.event("preempted", message, step=step, exit_status=EXIT_STATUS)
        raise SystemExit(EXIT_STATUS)

    def _state(self, **facts: Any) -> dict[str, Any]:
        """Return all that resuming needs besides weights and optimizer, as plain values and
        tensors.
        """
        progress = self._batches.progress
        return {
            training.SEED_KEY: self._resumed.seed,
            training.EPOCHS_KEY: progress.epoch,
            training.TOTAL_EPOCHS_KEY: self._settings.epochs,
            training.MAX_STEPS_KEY: self._resumed.max_steps_per_epoch,
            # torchtune's own recipe asks for it when it resumes, and does not use it.
            training.DATALOADER_KEY: {},
            STATE_KEY: {
                **self._resumed.state_dict(),
                "epochs": self._settings.epochs,
                "configured_batch_size": self._settings.batch_size,
                "base_rate": self._parts["learning_rate"].base,
                **self._batches.state_dict(),
                **{name: part.state_dict() for name, part in self._parts.items()},
                "random_states": distributed.all_gather(RandomState(self._job.device).state_dict()),
                **facts,
            },
        }

"""What a run loads from a checkpoint, of a step or an epoch, and how it saves them.

Any number of ranks may have saved what is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig
from torch.distributed.tensor import DTensor
from torchtune import training

from adaptive_batch import distributed
from adaptive_batch._util import format_bytes
from adaptive_batch.checkpoint import (
    CheckpointManager,
    load_named_optimizer_state,
    map_leaves,
    named_optimizer_state,
)
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.memory import tensors_in

from .epoch_checkpoints import ADAPTERS, STATE_KEY, EpochCheckpoints, manifests_in, resumable_order
from .model import Weights
from .saved_runs import SavedRuns
from .settings import Settings
from .trainer import Trainer

log = logging.getLogger("adaptive_batch")


class Checkpoints(Weights):
    """Epoch checkpoints and resume points (checkpoints of steps) of a run.

    Rank zero looks for them and sends what it found to the others; all read from a file system that
    they share.

    Args:
        cfg: configuration of the run.
        settings: settings of the configuration, checked.
        keeps_base: True where checkpoints are of adapters, on a base that is read again; see
            :class:`.FullModel`.
        on_failure: function that is called with the error of a resume point that failed in the
            background; None logs a warning.

    Attributes:
        found: checkpoint that the run begins with or resumes from.
        is_divided: True where each rank reads its own part of what trains.

    Raises:
        CheckpointError: the run resumes, and nothing complete is there, or saves of two runs.
        SettingError: the run resumes, and what is there is of another kind of fine-tuning.
    """

    def __init__(
        self,
        cfg: DictConfig,
        settings: Settings,
        *,
        keeps_base: bool = False,
        on_failure: Callable[[CheckpointError], object] | None = None,
    ) -> None:
        self._cfg = cfg
        self._keeps_base = keeps_base
        self._overwrites = settings.saving.overwrite_output_dir
        self._asynchronous = settings.saving.enable_async_checkpointing
        self._saved_runs = SavedRuns(cfg, keeps_base=keeps_base)
        self._group = distributed.host_group()
        epochs_folder = Path(cfg.checkpointer.output_dir)
        self._manager = CheckpointManager(
            Path(cfg.output_dir),
            keep_last=settings.saving.keep_last_n_checkpoints,
            asynchronous=self._asynchronous,
            process_group=self._group,
            others=lambda: (
                manifest.identity["order"] for _, manifest in manifests_in(epochs_folder)
            ),
            resumable_beside=lambda: resumable_order(cfg.checkpointer),
        )
        self._on_failure = on_failure or _warn_of_failure
        self._may_change_model = "model" in settings.saving.resume_allow_changes
        self.found = distributed.from_rank_zero(self._saved_runs.find)
        self._run = self.found.run
        self._base: dict[str, dict[str, int]] = {}
        # A preview needs no weights.
        if not settings.preview:
            epoch = None if keeps_base else self.found.epoch
            epochs = distributed.on_rank_zero(lambda: EpochCheckpoints(cfg.checkpointer, epoch))
            # On other ranks this is None, and nothing there asks it.
            self._epochs = cast(EpochCheckpoints, epochs)
        self.is_divided = self.found.point is not None

    # --- whose they are

    def begin_job(self, run: str) -> None:
        """Begin to save as a run; a restart by torchrun resumes this one.

        Under adapters, the files of the base are read, whose checksums every checkpoint has.

        Raises:
            CheckpointError: the base is not that on which a checkpoint was trained.
            SettingError: the run would replace one that has not ended.
        """
        self._run = run
        distributed.on_rank_zero(lambda: self._saved_runs.begin(run, overwrites=self._overwrites))
        if self._keeps_base:
            saved = (self.found.recipe_state or {}).get(STATE_KEY, {}).get("base")
            self._base = distributed.on_rank_zero(lambda: self._epochs.check_base(saved)) or {}

    def after_end(self) -> str:
        """Return what a run that ends now resumes from, as the end of a sentence; on rank zero."""
        # A resume point in the background may yet become complete; several ranks would have to
        # wait together, and only rank zero asks.
        with contextlib.suppress(CheckpointError):
            if distributed.world_size() == 1:
                self._manager.wait()
        newest = self._saved_runs.folder.newest_of(self._run)
        if newest is None:
            return (
                "nothing of this run is saved yet, so there is nothing to resume from; start it"
                " again"
            )
        # Where several runs have saved, the checkpoint has to be named.
        value = newest if len(self._saved_runs.folder.saves_by_run()) > 1 else True
        return f"resume_from_checkpoint={value} resumes from {newest}"

    # --- loading

    def load_weights(self) -> Mapping[str, Any]:
        """Load the state dict of the model, or of the base of adapters, on rank zero.

        Its names are torchtune's. It is empty on other ranks, and on rank zero too where the model
        is divided.
        """
        # torchtune's checkpointer learns from reading the base how to save: read it in any case.
        weights = distributed.on_rank_zero(lambda: self._epochs.load_weights())
        if weights is None or (self.is_divided and not self._keeps_base):
            return {}
        return weights

    def load_adapters(self) -> Mapping[str, torch.Tensor]:
        """Load the adapters of the epoch that is resumed from, on each rank, if there is one."""
        if not (self._keeps_base and self.found.epoch):
            return {}
        path = self.found.epoch.path / ADAPTERS
        adapters: dict[str, torch.Tensor] = torch.load(
            path, map_location="cpu", mmap=True, weights_only=True
        )
        return adapters

    def load_divided(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what each rank holds of a model from a resume point.

        Raises:
            CheckpointError: it cannot be read, or is of a model whose weights have other shapes.
        """
        assert self.found.point is not None
        try:
            self.found.point.load_into({"model": dict(state)}, process_group=self._group)
        except CheckpointError as error:
            if not self._may_change_model:
                raise
            remedy = "resume_allow_changes=[model] is for changes that keep the shape of weights"
            raise CheckpointError(f"{error}; {remedy}: resume with the checkpoint's") from error

    def load_optimizer(self, trainer: Trainer) -> None:
        """Load the optimizer's state, where training is resumed."""
        state: Mapping[str, Any] = {}
        if self.found.point:
            state = self.found.point.load_optimizer(
                trainer.optimizers, trainer.names_of_parameters, process_group=self._group
            )
        elif self.found.epoch:
            saved = torch.load(
                self.found.epoch.state_file, map_location="cpu", mmap=True, weights_only=True
            )
            state = saved.get(training.OPT_KEY, {})
        if state:
            load_named_optimizer_state(state, trainer.optimizers, trainer.names_of_parameters)

    # --- saving

    def save_epoch(
        self,
        trainer: Trainer,
        *,
        recipe_state: Mapping[str, Any] | None,
        epoch: int,
        ends_run: bool,
    ) -> None:
        """Save an epoch, once a resume point that is being written is complete or has failed.

        Where `recipe_state` is None, the optimizer is not saved either; nor where training is done
        and the disk holds the weights alone.

        Raises:
            CheckpointError: saving failed; what was saved before is untouched.
        """
        self._settle()
        content = trainer.to_save()
        state: dict[str, Any] | None = None
        if distributed.world_size() == 1:
            if recipe_state is not None:
                state = self._with_base(recipe_state)
                state[training.OPT_KEY] = trainer.optimizer.state_dict()
        elif recipe_state is not None:
            named = named_optimizer_state(trainer.optimizers, trainer.names_of_parameters)
            # Low-bit states cannot be put together: the epoch holds the weights alone, and a
            # resume point holds what it takes to resume.
            if distributed.any_of_ranks(_holds_low_bit(named)):
                steps = recipe_state[STATE_KEY]["progress"]["steps"]
                self.save_step(steps, trainer, state=recipe_state)
            else:
                state = self._with_base(recipe_state)
                state[training.OPT_KEY] = _whole_on_rank_zero(named)

        def save_with(kept: Mapping[str, Any] | None) -> None:
            assert self._run is not None, "no run has begun"
            try:
                self._epochs.save(
                    content,
                    recipe_state=kept,
                    epoch=epoch,
                    order=self._manager.next_order(),
                    run=self._run,
                    ends_run=ends_run,
                    make_room=self._manager.make_room,
                )
            except CheckpointError as error:
                raise CheckpointError(f"{error}; {self.after_end()}") from error

        def save() -> None:
            try:
                save_with(state)
            except CheckpointError as error:
                if state is None or not ends_run:
                    raise
                log.warning("the last epoch is saved again, as weights alone: %s", error)
                save_with(None)

        distributed.on_rank_zero(save)
        self._remove_earlier_runs()

    def mark_preempted(self, epoch: int) -> None:
        """Mark a saved epoch: its run was asked to end."""
        distributed.on_rank_zero(lambda: self._epochs.mark_preempted(epoch))

    def save_step(self, step: int, trainer: Trainer, *, state: Mapping[str, Any]) -> float:
        """Save a resume point; returns the seconds for which training waited.

        Raises:
            CheckpointError: saving failed, unless it is written in the background; what was saved
                before is untouched.
        """
        start = time.perf_counter()
        self._settle()
        optimizer = named_optimizer_state(trainer.optimizers, trainer.names_of_parameters)
        self._manager.save(
            step, {"model": trainer.model_state(), "optimizer": optimizer}, self._with_base(state)
        )
        if not self._asynchronous:
            self._remove_earlier_runs()
        return time.perf_counter() - start

    def _with_base(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a recipe state that names the files of the base, where there is one."""
        ours = dict(state[STATE_KEY])
        if self._keeps_base:
            ours["base"] = self._base
        return {**state, STATE_KEY: ours}

    def check_disk(self, num_bytes: int) -> None:
        """Refuse to train where not even one epoch could be saved.

        Args:
            num_bytes: bytes of the tensors of an epoch.

        Raises:
            SettingError: the disk has less free.
        """

        def check() -> None:
            folder = Path(self._cfg.checkpointer.output_dir).absolute()
            # A checkpointer of one's own may make it with its first file.
            nearest = next(path for path in (folder, *folder.parents) if path.exists())
            free = shutil.disk_usage(nearest).free
            if free < num_bytes:
                remedy = (
                    f"an epoch takes {format_bytes(num_bytes)}, and {format_bytes(free)} are free"
                    " there; free disk space, or give another folder"
                )
                raise SettingError("output_dir", str(folder), remedy)

        distributed.on_rank_zero(check)

    def wait(self) -> None:
        """Wait for a resume point that is being written; raise a CheckpointError if it failed."""
        self._manager.wait()

    def close(self) -> None:
        """Wait, and save no more; raise a CheckpointError if the last one failed."""
        self._manager.close()

    def _remove_earlier_runs(self) -> None:
        """Remove what this run replaces, once, after its first save is complete."""
        if not self._overwrites:
            return
        run = self._run
        assert run is not None, "no run has begun"
        is_removed = distributed.from_rank_zero(lambda: self._saved_runs.folder.remove_others(run))
        self._overwrites = not is_removed

    def _settle(self) -> None:
        """Wait for a resume point that is being written; report a failure without raising it."""
        try:
            self._manager.wait()
        except CheckpointError as error:
            self._on_failure(error)
        self._remove_earlier_runs()


def _warn_of_failure(error: CheckpointError) -> None:
    log.warning("training continues without a resume point: %s", error)


def _whole_on_rank_zero(tree: Any) -> Any:
    """Put the tensors of a tree together on the host of rank zero, and None on other ranks.

    A collective.
    """

    def gathered(_: object, tensor: torch.Tensor) -> torch.Tensor | None:
        whole = distributed.whole_tensor(tensor)
        if not distributed.is_rank_zero():
            return None
        return whole.cpu()

    return map_leaves(gathered, tree, torch.Tensor)


def _holds_low_bit(tree: Any) -> bool:
    """Whether this rank's part of a DTensor in a tree wraps tensors, as low-bit states do.

    Such states are torchao's.
    """
    return any(
        hasattr(tensor.to_local(), "__tensor_flatten__")
        for tensor in tensors_in(tree)
        if isinstance(tensor, DTensor)
    )

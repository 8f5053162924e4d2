"""Where a run resumes: from the latest complete checkpoint, of a step or an epoch.

Any number of ranks may have saved it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig
from torch.distributed.tensor import DTensor
from torchtune import training

from adaptive_batch import distributed
from adaptive_batch._torch import is_traceable_wrapper_subclass, tree_leaves, tree_map_only
from adaptive_batch._util import atomic_write, format_bytes
from adaptive_batch.checkpoint import (
    Checkpoint,
    CheckpointManager,
    SkippedCheckpoint,
    checkpoints_in,
    load_named_optimizer_state,
    named_optimizer_state,
    newest_complete,
)
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.report import read_records

from .epoch_checkpoints import (
    ADAPTERS,
    STATE_KEY,
    EpochCheckpoints,
    SavedEpoch,
    inspect_epoch,
    orders_of_epochs,
)
from .settings import Settings
from .trainer import Trainer

log = logging.getLogger("adaptive_batch")


@dataclass
class Found:
    """What rank zero found to begin or to resume from.

    Attributes:
        source: place of the weights, in words.
        recipe_state: state that was saved with weights and optimizer; None unless resuming.
        point, epoch: resume point or epoch; None at the base.
        passed_over: lines, one for each newer checkpoint that was skipped.
        holds_earlier_run: True where training begins in a folder that holds an earlier run.
    """

    source: str
    recipe_state: dict[str, Any] | None = None
    point: Checkpoint | None = None
    epoch: SavedEpoch | None = None
    passed_over: list[str] = field(default_factory=list)
    holds_earlier_run: bool = False


class Checkpoints:
    """Epoch checkpoints and resume points (checkpoints of steps) of a run.

    Rank zero looks for them and sends what it found to the others; all read from a file system that
    they share.

    Args:
        cfg: configuration of the run.
        settings: settings of the configuration, checked.
        keeps_base: True where checkpoints are of adapters, on a base that is read again; see
            :class:`.ModelBuilder`.
        only: path of the checkpoint to resume from; None for the newest.
        on_failure: function that is called with the error of a resume point that failed in the
            background; None logs a warning.

    Attributes:
        found: checkpoint that the run begins with or resumes from.
        is_divided: True where each rank reads its own part of what trains.

    Raises:
        CheckpointError: the run resumes, and nothing complete is there.
        SettingError: the run resumes, and what is there is of another kind of fine-tuning.
    """

    def __init__(
        self,
        cfg: DictConfig,
        settings: Settings,
        *,
        keeps_base: bool = False,
        only: Path | None = None,
        on_failure: Callable[[CheckpointError], object] | None = None,
    ) -> None:
        self._cfg = cfg
        self._keeps_base = keeps_base
        self._only = only
        self._output_dir = Path(cfg.output_dir)
        self._group = distributed.host_group()
        self._manager = CheckpointManager(
            self._output_dir,
            keep_last=settings.keep_last_n_checkpoints,
            asynchronous=settings.enable_async_checkpointing,
            process_group=self._group,
            others=lambda: orders_of_epochs(Path(cfg.checkpointer.output_dir)),
        )
        self._on_failure = on_failure or _warn_of_failure
        self._job = self._output_dir / "adaptive_batch" / "job.json"
        self._launch = distributed.launch_name()
        self.found = distributed.from_rank_zero(self._find)
        self._run = _run(self.found.recipe_state)
        self._base: dict[str, dict[str, int]] = {}
        # A preview needs no weights.
        if not settings.preview:
            epoch = None if keeps_base else self.found.epoch
            epochs = distributed.on_rank_zero(lambda: EpochCheckpoints(cfg.checkpointer, epoch))
            # On other ranks this is None, and nothing there asks it.
            self._epochs = cast(EpochCheckpoints, epochs)
        self.is_divided = self.found.point is not None

    # --- looking

    def begin_job(self, run: str) -> None:
        """Write down which run torchrun has started, so that a restart resumes this run.

        Without it, a restart could resume an earlier run. Under adapters, the files of the base
        are read, whose checksums every checkpoint has.

        Raises:
            CheckpointError: the base is not that on which a checkpoint was trained.
        """
        self._run = run
        if self._keeps_base:
            saved = (self.found.recipe_state or {}).get(STATE_KEY, {}).get("base")
            self._base = distributed.on_rank_zero(lambda: self._epochs.check_base(saved)) or {}
        if distributed.is_rank_zero() and self._launch is not None:
            atomic_write(self._job, json.dumps({"run": run, "launch": self._launch}))

    def _find(self) -> Found:
        restarted = self._find_of_job()
        if restarted is not None:
            return restarted
        if self._cfg.resume_from_checkpoint:
            block = self._cfg.checkpointer
            recipe_checkpoint = block.get("recipe_checkpoint")
            if recipe_checkpoint and not Path(block.output_dir, recipe_checkpoint).exists():
                remedy = (
                    f"there is no such file in {block.output_dir}; leave it out: resuming finds the"
                    " recipe state itself"
                )
                raise SettingError("checkpointer.recipe_checkpoint", recipe_checkpoint, remedy)
            return self._find_saved()
        saved, skipped = self._saved()
        holds_earlier_run = bool(saved) or any(checkpoint.is_ours for checkpoint in skipped)
        return Found("the base checkpoint", holds_earlier_run=holds_earlier_run)

    def _find_of_job(self) -> Found | None:
        """Find what the run has saved that torchrun has restarted; None where that is nothing."""
        try:
            job = json.loads(self._job.read_text())
            # The file is of an earlier launch: this one was ended before it wrote its own.
            if job["launch"] != self._launch:
                return None
            saved = self._find_saved()
        except (OSError, ValueError, KeyError, CheckpointError):
            return None
        if _run(saved.recipe_state) != job["run"]:
            return None
        return saved

    def _find_saved(self) -> Found:
        saved = self._newest_saved()
        holds_adapters = "base" in (saved.recipe_state or {}).get(STATE_KEY, {})
        # torchtune's own recipes save no state of ours: the files of an epoch tell what it holds.
        if saved.epoch:
            holds_adapters = (saved.epoch.path / ADAPTERS).exists()
        if holds_adapters != self._keeps_base:
            if holds_adapters:
                content = "adapters"
                trained = "weights"
                recipe = "adaptive_lora_finetune"
            else:
                content = "weights without adapters"
                trained = "adapters"
                recipe = "adaptive_full_finetune"
            remedy = (
                f"{saved.source} holds {content}, and {trained} are trained here; resume it with"
                f" `tune run {recipe}`"
            )
            raise SettingError(
                "resume_from_checkpoint", True, f"{remedy}, or give another output_dir"
            )
        return saved

    def _newest_saved(self) -> Found:
        newest, skipped = newest_complete(*self._saved())
        passed_over = [checkpoint.describe() for checkpoint in skipped]
        if newest is None:
            raise CheckpointError(self._nothing_complete(passed_over))
        state = _recipe_state(newest)
        # What is damaged may be all of the latest run: resuming an earlier one would go unnoticed.
        if any(checkpoint.is_ours for checkpoint in skipped):
            last_run = self._last_run()
            if last_run is not None and last_run != _run(state):
                remedy = (
                    "restore what was saved, remove it to resume the earlier run, or begin again"
                    " (resume_from_checkpoint=False)"
                )
                raise CheckpointError(
                    f"{'; '.join(passed_over)}; {newest.path} is of an earlier run: {remedy}"
                )
        if isinstance(newest, SavedEpoch):
            return Found(str(newest.path), state, None, newest, passed_over)
        recipe_checkpoint = self._cfg.checkpointer.get("recipe_checkpoint")
        if recipe_checkpoint:
            passed_over.append(
                f"checkpointer.recipe_checkpoint={recipe_checkpoint} has no effect:"
                f" {newest.path.name} is newer"
            )
        return Found(str(newest.path), state, newest, None, passed_over)

    def _last_run(self) -> str | None:
        """Return which run was started last in the folder; None where that is not known."""
        path = self._output_dir / "adaptive_batch" / "run.jsonl"
        if not path.exists():
            return None
        starts = [record for record in read_records(path) if record["kind"] == "start"]
        if not starts:
            return None
        run: str = starts[-1]["run"]
        return run

    def _saved(self) -> tuple[list[Checkpoint | SavedEpoch], list[SkippedCheckpoint]]:
        """Return the checkpoints to resume from, as far as sizes tell, and those to skip."""
        steps, skipped = checkpoints_in(self._output_dir)
        saved: list[Checkpoint | SavedEpoch] = [*steps]
        epoch = inspect_epoch(self._cfg.checkpointer)
        if isinstance(epoch, SavedEpoch):
            saved.append(epoch)
        elif epoch is not None:
            skipped.append(epoch)
        if self._only is not None:
            saved = [checkpoint for checkpoint in saved if checkpoint.path == self._only]
            skipped = [checkpoint for checkpoint in skipped if checkpoint.path == self._only]
        return saved, skipped

    def after_end(self) -> str:
        """Return what a run that ends now resumes from, as the end of a sentence; on rank zero."""
        # A resume point in the background may yet become complete; several ranks would have to
        # wait together, and only rank zero asks.
        with contextlib.suppress(CheckpointError):
            if distributed.world_size() == 1:
                self._manager.wait()
        saved, _ = self._saved()
        newest = max(
            saved, key=lambda checkpoint: (checkpoint.order, checkpoint.step), default=None
        )
        if newest is not None and _run(_recipe_state(newest)) == self._run:
            return f"resume_from_checkpoint=True resumes from {newest.path}"
        return (
            "nothing of this run is saved yet, so there is nothing to resume from; start it again"
        )

    def _nothing_complete(self, passed_over: list[str]) -> str:
        """Return why there is nothing to resume from."""
        folder = self._output_dir
        if passed_over:
            remedy = "restore what was saved, or begin again (resume_from_checkpoint=False)"
            return (
                f"{folder} holds nothing complete to resume from ({'; '.join(passed_over)});"
                f" {remedy}"
            )
        if any(folder.glob("epoch_*")):
            return (
                f"{folder} holds the weights of a run that is done, and nothing to resume from: the"
                " last epoch is saved without its recipe_state; train on from its weights with"
                " another output_dir and resume_from_checkpoint=False"
            )
        return (
            f"{folder} holds nothing to resume from: no resume point (step_N), and no recipe_state"
            " of an epoch; check output_dir, or set resume_from_checkpoint=False to begin, as for"
            " a run that was ended before its first save"
        )

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
        """Load what each rank holds of a model from a resume point."""
        assert self.found.point is not None
        self.found.point.load_into({"model": dict(state)}, process_group=self._group)

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
        self, trainer: Trainer, *, recipe_state: Mapping[str, Any] | None, epoch: int
    ) -> None:
        """Save an epoch, once a resume point that is being written is complete or has failed.

        Where training is done, `recipe_state` is None, and the optimizer is not saved either.

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

        def save() -> None:
            try:
                self._epochs.save(
                    content, recipe_state=state, epoch=epoch, order=self._manager.next_order()
                )
            except CheckpointError as error:
                raise CheckpointError(f"{error}; {self.after_end()}") from error

        distributed.on_rank_zero(save)

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

    def _settle(self) -> None:
        """Wait for a resume point that is being written; report a failure without raising it."""
        try:
            self._manager.wait()
        except CheckpointError as error:
            self._on_failure(error)


def _warn_of_failure(error: CheckpointError) -> None:
    log.warning("training continues without a resume point: %s", error)


def _recipe_state(saved: Checkpoint | SavedEpoch) -> dict[str, Any]:
    if isinstance(saved, SavedEpoch):
        return saved.state
    state: dict[str, Any] = saved.load_small_state()
    return state


def _run(recipe_state: Mapping[str, Any] | None) -> str | None:
    """Return which run saved a recipe state; None for a recipe of torchtune's own."""
    run: str | None = (recipe_state or {}).get(STATE_KEY, {}).get("run")
    return run


def _whole_on_rank_zero(tree: Any) -> Any:
    """Put the tensors of a tree together on the host of rank zero, and None on other ranks.

    A collective.
    """

    def gathered(tensor: torch.Tensor) -> torch.Tensor | None:
        whole = tensor
        if isinstance(tensor, DTensor):
            whole = tensor.full_tensor()
        if not distributed.is_rank_zero():
            return None
        return whole.cpu()

    return tree_map_only(torch.Tensor, gathered, tree)


def _holds_low_bit(tree: Any) -> bool:
    """Whether this rank's part of a DTensor in a tree wraps tensors, as low-bit states do.

    Such states are torchao's.
    """
    parts = (leaf.to_local() for leaf in tree_leaves(tree) if isinstance(leaf, DTensor))
    return any(map(is_traceable_wrapper_subclass, parts))

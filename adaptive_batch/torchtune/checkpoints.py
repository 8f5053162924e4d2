"""Where a run resumes: from the latest complete checkpoint, of a step or an epoch, saved by any
number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
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
from adaptive_batch._util import atomic_write
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
        source: where the weights are.
        recipe_state: what was saved with weights and optimizer; None unless resuming.
        point, epoch: the resume point or the epoch; None at the base.
        passed_over: a line for each newer checkpoint that was skipped.
        holds_earlier_run: training begins in a folder where something else was saved.
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
        cfg: the configuration.
        settings: the same, checked.
        keeps_base: checkpoints are of adapters, on a base that is read again; see
            :class:`.ModelBuilder`.
        only: the one to resume from; None for the newest.
        on_failure: function that is called with the error of a resume point that failed in the
            background; None logs a warning.

    Attributes:
        found: to begin or to resume from.
        is_divided: each rank reads its own part of what trains.

    Raises:
        CheckpointError: resuming, and nothing complete is there.
        SettingError: resuming, and what is there is of another kind of fine-tuning.
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
        if not settings.preview:  # which needs no weights
            epoch = None if keeps_base else self.found.epoch
            epochs = distributed.on_rank_zero(lambda: EpochCheckpoints(cfg.checkpointer, epoch))
            self._epochs = cast(EpochCheckpoints, epochs)  # on rank zero
        self.is_divided = self.found.point is not None

    # --- looking
    # ----------------------------------------------------------------------------------------------------

    def begin_job(self, run: str) -> None:
        """Write down which run torchrun has started, so that after a restart this run, and no
        earlier one, is resumed.

        Under adapters, the files of the base are read, whose checksums every checkpoint has.

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
        if found := self._find_of_job():
            return found
        if self._cfg.resume_from_checkpoint:
            block = self._cfg.checkpointer
            if (given := block.get("recipe_checkpoint")) and not Path(
                block.output_dir, given
            ).exists():
                remedy = (
                    f"there is no such file in {block.output_dir}; leave it out: resuming finds the"
                    " recipe state itself"
                )
                raise SettingError("checkpointer.recipe_checkpoint", given, remedy)
            return self._find_saved()
        saved, skipped = self._saved()
        return Found(
            "the base checkpoint",
            holds_earlier_run=bool(saved) or any(one.is_ours for one in skipped),
        )

    def _find_of_job(self) -> Found | None:
        """Find what the run has saved that torchrun has restarted; None where that is nothing."""
        try:
            job = json.loads(self._job.read_text())
            if job["launch"] != self._launch:
                return None  # an earlier launch's: this one was ended before it wrote its own
            found = self._find_saved()
        except (OSError, ValueError, KeyError, CheckpointError):
            return None
        return found if _run(found.recipe_state) == job["run"] else None

    def _find_saved(self) -> Found:
        found = self._newest_saved()
        holds_adapters = "base" in (found.recipe_state or {}).get(STATE_KEY, {})
        if found.epoch:
            holds_adapters = (found.epoch.path / ADAPTERS).exists()
        if holds_adapters != self._keeps_base:
            other, is_here = (
                ("adaptive_lora_finetune", "weights")
                if holds_adapters
                else ("adaptive_full_finetune", "adapters")
            )
            held = "adapters" if holds_adapters else "weights without adapters"
            remedy = (
                f"{found.source} holds {held}, and {is_here} are trained here; resume it with `tune"
                f" run {other}`"
            )
            raise SettingError(
                "resume_from_checkpoint", True, f"{remedy}, or give another output_dir"
            )
        return found

    def _newest_saved(self) -> Found:
        newest, others = newest_complete(*self._saved())
        passed_over = [passed.describe() for passed in others]
        if newest is None:
            raise CheckpointError(self._nothing_complete(passed_over))
        state = _recipe_state(newest)
        if any(one.is_ours for one in others) and self._last_run() not in (None, _run(state)):
            remedy = (
                "restore what was saved, remove it to resume the earlier run, or begin again"
                " (resume_from_checkpoint=False)"
            )
            raise CheckpointError(
                f"{'; '.join(passed_over)}; {newest.path} is of an earlier run: {remedy}"
            )
        if isinstance(newest, SavedEpoch):
            return Found(str(newest.path), state, None, newest, passed_over)
        if given := self._cfg.checkpointer.get("recipe_checkpoint"):
            passed_over.append(
                f"checkpointer.recipe_checkpoint={given} has no effect: {newest.path.name} is newer"
            )
        return Found(str(newest.path), state, newest, None, passed_over)

    def _last_run(self) -> str | None:
        """Return which run was started last in the folder; None where that is not known."""
        path = self._output_dir / "adaptive_batch" / "run.jsonl"
        starts = (
            [record for record in read_records(path) if record["kind"] == "start"]
            if path.exists()
            else []
        )
        return starts[-1]["run"] if starts else None

    def _saved(self) -> tuple[list[Checkpoint | SavedEpoch], list[SkippedCheckpoint]]:
        """Return all that there is to resume from, as far as its sizes tell, and what only looks
        like it.
        """
        saved, skipped = checkpoints_in(self._output_dir)
        epoch = inspect_epoch(self._cfg.checkpointer)
        if isinstance(epoch, SkippedCheckpoint):
            skipped.append(epoch)
        found: list[Checkpoint | SavedEpoch] = [
            *saved,
            *([epoch] if isinstance(epoch, SavedEpoch) else []),
        ]
        wanted = [one for one in found if self._only in (None, one.path)]
        return wanted, [one for one in skipped if self._only in (None, one.path)]

    def after_end(self) -> str:
        """Return what is resumed from if the run ends now, as the end of a sentence; on rank zero."""
        with contextlib.suppress(CheckpointError):
            if distributed.world_size() == 1:
                self._manager.wait()
        newest = max(self._saved()[0], key=lambda one: (one.order, one.step), default=None)
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
    # ----------------------------------------------------------------------------------------------------

    def load_weights(self) -> Mapping[str, Any]:
        """Load the state dict of the model, or of the base of adapters, in torchtune's naming, on
        rank zero; nothing on others.

        Nothing on rank zero either where the model is divided; but torchtune's checkpointer learns
        from reading the base how to save, so it is read in any case.
        """
        weights = distributed.on_rank_zero(lambda: self._epochs.load_weights()) or {}
        return {} if self.is_divided and not self._keeps_base else weights

    def load_adapters(self) -> Mapping[str, torch.Tensor]:
        """Load the adapters of the epoch that is resumed from, on each rank; none where there is
        none.
        """
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
    # -----------------------------------------------------------------------------------------------------

    def save_epoch(
        self, trainer: Trainer, *, recipe_state: Mapping[str, Any] | None, epoch: int
    ) -> None:
        """Save an epoch, once a resume point that is being written is complete or has failed.

        Where training is done, `recipe_state` is None, and the optimizer is not saved either.

        Raises:
            CheckpointError: saving failed; what was saved before is untouched.
        """
        self._settle()
        optimizer: Any
        content = trainer.to_save()
        if distributed.world_size() == 1:
            optimizer = trainer.optimizer.state_dict()
        else:
            named = named_optimizer_state(trainer.optimizers, trainer.names_of_parameters)
            if recipe_state is not None and distributed.any_of_ranks(_holds_low_bit(named)):
                # which cannot be put together: the epoch holds the weights alone, and a resume
                # point what it takes to resume
                self.save_step(
                    recipe_state[STATE_KEY]["progress"]["steps"], trainer, state=recipe_state
                )
                recipe_state = None
            optimizer = {} if recipe_state is None else _whole_on_rank_zero(named)
        state = (
            None
            if recipe_state is None
            else {**self._with_base(recipe_state), training.OPT_KEY: optimizer}
        )

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
        base = {"base": self._base} if self._keeps_base else {}
        return {**state, STATE_KEY: {**state[STATE_KEY], **base}}

    def wait(self) -> None:
        """Wait for a resume point that is being written; raise a CheckpointError if it failed."""
        self._manager.wait()

    def close(self) -> None:
        """Wait, and save no more; raise a CheckpointError if the last one failed."""
        self._manager.close()

    def _settle(self) -> None:
        """Wait for a resume point that is being written in the background; a failure is reported,
        not raised.
        """
        try:
            self._manager.wait()
        except CheckpointError as error:
            self._on_failure(error)


def _warn_of_failure(error: CheckpointError) -> None:
    log.warning("training continues without a resume point: %s", error)


def _recipe_state(saved: Checkpoint | SavedEpoch) -> dict[str, Any]:
    state: dict[str, Any] = (
        saved.load_small_state() if isinstance(saved, Checkpoint) else saved.state
    )
    return state


def _run(recipe_state: Mapping[str, Any] | None) -> str | None:
    """Return which run saved a recipe state; None for a recipe of torchtune's own."""
    run: str | None = (recipe_state or {}).get(STATE_KEY, {}).get("run")
    return run


def _whole_on_rank_zero(tree: Any) -> Any:
    """Put the tensors of a tree together on the host of rank zero; a collective, which leaves None
    on other ranks.
    """

    def gathered(tensor: torch.Tensor) -> torch.Tensor | None:
        whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.cpu() if distributed.is_rank_zero() else None

    return tree_map_only(torch.Tensor, gathered, tree)


def _holds_low_bit(tree: Any) -> bool:
    """Whether this rank's part of a DTensor in a tree wraps other tensors, as torchao's low-bit
    states do.
    """
    parts = (leaf.to_local() for leaf in tree_leaves(tree) if isinstance(leaf, DTensor))
    return any(map(is_traceable_wrapper_subclass, parts))

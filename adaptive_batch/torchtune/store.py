"""Checkpoints of a run in ``output_dir/step_N``, and an export of the weights after each epoch.

A checkpoint is written atomically, stores the name of its run, and is the only input of resuming.
It is saved before the export of its epoch. If a kill prevents an export, the run makes it on
resuming.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from omegaconf import ListConfig
from torch.distributed.checkpoint.stateful import Stateful

from adaptive_batch import distributed
from adaptive_batch._util import format_bytes
from adaptive_batch.checkpoint import (
    Checkpoint,
    CheckpointManager,
    checkpoints_in,
    load_named_optimizer_state,
    named_optimizer_state,
    newest_complete,
    remove_folder,
)
from adaptive_batch.data import Batches
from adaptive_batch.distributed import EXIT_STATUS, Preemption
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.memory import RandomState
from adaptive_batch.report import started_runs

from .checks import AUTO, check_output_dir
from .job import Job
from .log import TrainingLog
from .model import Weights
from .model_files import Export, ModelFiles, exports_in
from .resume import FoundCheckpoint, ResumedRun
from .trainer import Trainer

log = logging.getLogger("adaptive_batch")
Part = TypeVar("Part", bound=Stateful)


def _described(saves_by_run: Mapping[Any, list[Path]]) -> str:
    """Format runs and the names of their saves."""
    return ", ".join(
        f"{f'run {run}' if run else 'an unknown run'} ({', '.join(path.name for path in paths)})"
        for run, paths in saves_by_run.items()
    )


class FinishedError(CheckpointError):
    """A command with ``resume_from_checkpoint=auto`` finds the run finished."""


class RunStore:
    """Checkpoints and exports in the output folder, including those of earlier runs; finds and
    loads the checkpoint that a run starts from.

    Rank 0 searches for it and broadcasts the result. All ranks read it from a shared file system.
    The number of ranks may differ from the save.

    Args:
        job: job of the run.

    Attributes:
        path: output folder.
        exports_path: folder of the exports.
        files: files of the base model and of exports, on rank 0; not in a preview.
        found: checkpoint and state at the start of the run.
        weights: weights of the base model and of the checkpoint.

    Raises:
        CheckpointError: the run resumes, but the folder has no complete checkpoint, or has saves of
            two runs.
        SettingError: the given path is not a checkpoint.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.path = Path(job.cfg.output_dir)
        self.exports_path = check_output_dir(
            job.cfg.checkpointer.output_dir, key="checkpointer.output_dir"
        )
        self._group = distributed.host_group()
        self.found = distributed.from_rank_zero(self.find)
        self.weights = Weights(
            self._load_base, self._load_shards if self.found.checkpoint else None
        )
        # A preview loads no weights, so their files may be missing.
        if not job.settings.preview:
            files = distributed.on_rank_zero(lambda: ModelFiles(job.cfg.checkpointer))
            # None on other ranks, which do not use it.
            self.files = cast(ModelFiles, files)

    # --- saves in the output folder, for rank 0 only; every method reads the folder again

    def saves_by_run(self) -> dict[str | None, list[Path]]:
        """Return the checkpoints, oldest first, and exports by run; None for saves without a
        run name.
        """
        # A folder with a problem is a checkpoint, damaged or of another version, if we know its
        # format or its order. Leave any other alone: `step_N` of another program is not a save.
        checkpoints = [
            each for each in checkpoints_in(self.path) if each.is_ours or each.order is not None
        ]
        checkpoints.sort(key=lambda checkpoint: checkpoint.age)
        saves: list[Checkpoint | Export] = [*checkpoints, *exports_in(self.exports_path)]
        paths_by_run: dict[str | None, list[Path]] = {}
        for save in saves:
            paths_by_run.setdefault(save.run, []).append(save.path)
        return paths_by_run

    def newest(self, runs: Collection[str | None] | None = None) -> Checkpoint | None:
        """Return the newest checkpoint of some runs, or of all, without reading its large files;
        None if there is none.
        """
        complete = [each for each in checkpoints_in(self.path) if not each.problem]
        of_runs = [each for each in complete if runs is None or each.run in runs]
        return max(of_runs, key=lambda each: each.age, default=None)

    def remove_others(self, run: str) -> bool:
        """Remove the saves of other runs once this run has one; return whether it has one."""
        is_exported = any(export.run == run for export in exports_in(self.exports_path))
        if not (is_exported or self.newest([run])):
            return False
        for owner, paths in self.saves_by_run().items():
            if owner != run:
                for path in paths:
                    remove_folder(path)
        return True

    # --- start of a run

    def find(self) -> FoundCheckpoint:
        """Find the checkpoint to resume from.

        Raises:
            CheckpointError: the run resumes, but the folder has no complete checkpoint, or has
                saves of two runs.
            FinishedError: the last epoch was saved without a checkpoint.
            SettingError: the given path is not a checkpoint, or torchrun restarts the run and it
                would not resume.
        """
        # True, False, "auto" or the path of a checkpoint.
        asked = self._job.cfg.resume_from_checkpoint
        if asked not in (True, AUTO) and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
            remedy = (
                "after a restart by torchrun, the run would start here again instead of resuming"
                " from its newest checkpoint; give auto, and a new output_dir for a new run, or"
                " --max-restarts 0"
            )
            raise SettingError("resume_from_checkpoint", asked, remedy)
        if not isinstance(asked, bool | None) and asked != AUTO:
            return self._find_named(Path(str(asked)).absolute())
        saves = self.saves_by_run()
        if not asked or (asked == AUTO and not saves):
            return FoundCheckpoint()
        named_runs = {run: paths for run, paths in saves.items() if run is not None}
        newest = self.newest(named_runs)
        if len(named_runs) > 1:
            example = newest.path if newest else "OUTPUT_DIR/step_100"
            raise CheckpointError(
                f"{self.path} holds saves of {len(named_runs)} runs: {_described(named_runs)};"
                f" name the checkpoint to resume from, as in resume_from_checkpoint={example}"
            )
        if asked == AUTO:
            # An export of the last epoch that is newer than all checkpoints ends its run: resuming
            # from an earlier checkpoint would train the end of the run again.
            newest_age = newest.age if newest else (0, 0)
            for export in exports_in(self.exports_path):
                is_last = export.run in named_runs and export.epoch + 1 >= self._job.cfg.epochs
                if is_last and (export.order, export.step or 0) > newest_age:
                    raise FinishedError(
                        f"nothing to train: run {export.run} is done ({export.path}); only a run"
                        " with keep_final_state=True continues if you raise epochs"
                    )
        return self._newest_intact(checkpoints_in(self.path))

    def _find_named(self, path: Path) -> FoundCheckpoint:
        """Find the checkpoint at an absolute path, which may be in the folder of another run."""
        named = [each for each in checkpoints_in(path.parent) if each.path.absolute() == path]
        if not named:
            remedy = "give True, False, auto, or a checkpoint's folder such as OUTPUT_DIR/step_100"
            raise SettingError("resume_from_checkpoint", str(path), remedy)
        # The only one, whose files this checks.
        return self._newest_intact(named)

    def _newest_intact(self, checkpoints: list[Checkpoint]) -> FoundCheckpoint:
        """Return the newest checkpoint whose files match their saved checksums.

        Raises:
            CheckpointError: there is none, or a damaged checkpoint may belong to a later run.
        """
        newest, newer = newest_complete(checkpoints)
        passed_over = [f"{damaged.path} is skipped: {damaged.problem}" for damaged in newer]
        if newest is None:
            problems = "".join(f"; {line}" for line in passed_over)
            raise CheckpointError(
                f"resume_from_checkpoint={self._job.cfg.resume_from_checkpoint} finds no complete"
                f" checkpoint (step_N){problems}: check output_dir={self.path}, or set"
                " resume_from_checkpoint=False to start (overwrite_output_dir=True replaces all"
                " saves in output_dir). To train on from the weights of a finished run, or of"
                " torchtune's own recipe, whose recipe_state.pt cannot be resumed, give them as"
                " checkpointer.checkpoint_dir with another output_dir"
            )
        starts = started_runs(self.path)
        # Without a run log, no later run is known.
        is_of_latest_run = not starts or starts[-1] == newest.run
        if any(damaged.is_ours for damaged in newer) and not is_of_latest_run:
            # The damaged folders may hold all of the latest run: do not resume an earlier one.
            raise CheckpointError(
                f"{'; '.join(passed_over)}; {newest.path} belongs to an earlier run: restore"
                " the damaged files, remove them to resume the earlier run, or start again"
                " (resume_from_checkpoint=False overwrite_output_dir=True)"
            )
        return FoundCheckpoint(newest, newest.load_small_state(), tuple(passed_over))

    # --- one folder, one run

    def check(self, run: str, *, overwrites: bool) -> str:
        """Refuse a run that may not start in this folder.

        Args:
            run: name of the run that starts or resumes.
            overwrites: whether the run may replace saves of other runs.

        Returns:
            Description of the saves to replace; empty if there are none.

        Raises:
            SettingError: the folder has saves of another run, or the run would remove its own base
                model.
        """
        saves = self.saves_by_run()
        others = {owner: paths for owner, paths in saves.items() if owner != run}
        if overwrites:
            self._refuse_removing_inputs(others)
            return _described(others)
        # A run that has saved in this folder resumes beside the saves of others.
        if others and run not in saves:
            newest = self.newest(others)
            resumes = f" resume it (resume_from_checkpoint={newest.path})," if newest else ""
            remedy = (
                f"it holds the saves of {_described(others)};{resumes} give another folder, or"
                " replace them (overwrite_output_dir=True)"
            )
            raise SettingError("output_dir", str(self.path), remedy)
        return ""

    def _refuse_removing_inputs(self, removed: Mapping[str | None, list[Path]]) -> None:
        """Raise if the run reads a model or tokenizer from a folder that it would remove."""
        folders = [path.resolve() for paths in removed.values() for path in paths]
        for key, path in self._input_paths():
            if any(map(path.resolve().is_relative_to, folders)):
                remedy = (
                    "overwrite_output_dir=True would remove it, since an earlier run saved it in"
                    f" {self.path}; give another output_dir"
                )
                raise SettingError(key, str(path), remedy)

    def _input_paths(self) -> Iterator[tuple[str, Path]]:
        """Yield the keys and paths of the models and the tokenizer that the run reads."""
        for name in ("checkpointer", "ref_checkpointer", "teacher_checkpointer", "tokenizer"):
            block: Any = self._job.cfg.get(name) or {}
            for key in ("checkpoint_dir", "path"):
                if isinstance(block.get(key), str):
                    yield f"{name}.{key}", Path(block[key])
            files = block.get("checkpoint_files")
            # torchtune also takes a pattern of the file names in checkpoint_dir.
            if isinstance(files, ListConfig):
                for file in files:
                    yield f"{name}.checkpoint_files", Path(block.get("checkpoint_dir", ""), file)

    # --- loading

    def _load_base(self) -> Mapping[str, Any]:
        """Load the state dict of the base model on rank 0, with torchtune's names."""
        # Load even if a checkpoint holds the whole model: torchtune's checkpointer has to read the
        # base model before it can save.
        base = distributed.on_rank_zero(lambda: self.files.load_weights()) or {}
        checkpoint_is_whole = (
            self.found.checkpoint is not None and not self._job.builder.has_frozen_base
        )
        return {} if checkpoint_is_whole else base

    def _load_shards(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's shards of a model from the checkpoint; raise CheckpointError if its
        weights have other shapes.
        """
        assert self.found.checkpoint is not None
        self.found.checkpoint.load_into({"model": dict(state)}, process_group=self._group)

    def load_optimizer(self, trainer: Trainer) -> None:
        """Load the optimizer state if the run resumes from a checkpoint."""
        if self.found.checkpoint:
            names = trainer.names_of_parameters
            state = self.found.checkpoint.load_optimizer(
                trainer.optimizers, names, process_group=self._group
            )
            load_named_optimizer_state(state, trainer.optimizers, names)


class Saver:
    """Saves a run after each epoch, at a step interval, and on a stop request.

    Args:
        job: job of the run.
        store: checkpoint that the run starts from, and its folder.
        resumed: state at the start of the run.
        batches: steps and progress of the run.
        log: log of each save.
        same_within: see :class:`.Preemption`.

    Attributes:
        preemption: context that records a request to stop this process.
        replaces: description of other runs' saves that the first save of this run removes.

    Raises:
        CheckpointError: the base model of the adapters differs from that of the checkpoint.
        SettingError: the folder has saves of another run.
    """

    def __init__(
        self,
        job: Job,
        store: RunStore,
        resumed: ResumedRun,
        batches: Batches,
        log: TrainingLog,
        *,
        same_within: float,
    ) -> None:
        self._job = job
        self._settings = job.settings
        self._store = store
        self._resumed = resumed
        self._run = resumed.name
        self._batches = batches
        self._log = log
        self.preemption = Preemption(same_within=same_within)
        # Objects with a state dict, by their names in checkpoints.
        self._parts: dict[str, Any] = {}
        self.replaces = distributed.from_rank_zero(
            lambda: self._store.check(self._run, overwrites=self._settings.overwrite_output_dir)
        )
        distributed.on_rank_zero(lambda: store.files.clean_up())
        self._base_files = None
        if job.builder.has_frozen_base:
            saved_files = store.found.state.get("base")
            # A checkpoint of adapters holds the checksums of the base model's files instead of its
            # weights. Check that the base is still the same, and save the checksums again.
            self._base_files = distributed.on_rank_zero(lambda: store.files.check_base(saved_files))
        keep_last = self._settings.keep_last_n_checkpoints
        if self._settings.save_every_n_steps is None:
            # Checkpoints are saved only after epochs, and resuming needs only the newest.
            keep_last = 1
        self._manager = CheckpointManager(
            self._store.path,
            run=self._run,
            keep_last=keep_last,
            asynchronous=self._settings.enable_async_checkpointing,
            process_group=distributed.host_group(),
        )

    def check(self, trainer: Trainer) -> None:
        """Raise before training if the run could not be saved.

        Raises:
            CheckpointError: the optimizer state cannot be saved.
            SettingError: the disk has too little free space.
        """
        cfg = self._job.cfg
        saved: Mapping[str, torch.Tensor]
        if cfg.get("save_adapter_weights_only", False):
            saved = self._job.builder.state(trainer.model)
        else:
            # An export merges adapters into the base weights, so it is about as large as the model.
            saved = trainer.model.state_dict()
        # NF4 tensors are exported in the dtype that they stand for.
        num_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in saved.values())

        def check_disk() -> None:
            folder = self._store.exports_path.absolute()
            # A custom checkpointer may create the folder only with its first file. Until then, the
            # nearest parent is on the same disk.
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            free = shutil.disk_usage(existing).free
            if free < num_bytes:
                remedy = (
                    f"an epoch takes {format_bytes(num_bytes)}, but only {format_bytes(free)} are"
                    " free; free disk space, or give another folder"
                )
                raise SettingError("output_dir", str(folder), remedy)

        distributed.on_rank_zero(check_disk)
        # Raises for an optimizer whose state is not stored by parameter.
        named_optimizer_state(trainer.optimizers, trainer.names_of_parameters)

    def restore(self, name: str, part: Part) -> Part:
        """Register a part, and load its state if the checkpoint has one."""
        self.register(name, part)
        state = self._resumed.state_of(name)
        if state is not None:
            part.load_state_dict(state)
        return part

    def register(self, name: str, part: Part) -> Part:
        """Save the state of a part under a name in each checkpoint."""
        self._parts[name] = part
        return part

    def resume_hint(self) -> str:
        """Return how a run that ends now resumes, as the end of a sentence."""
        # Wait for an asynchronous save: it may be the newest checkpoint once it is complete. Do not
        # wait with several ranks: all of them would have to, and this rank may be the only caller.
        if distributed.world_size() == 1:
            with contextlib.suppress(CheckpointError):
                self._wait()
        newest = self._store.newest([self._run])
        if newest is None:
            return "this run has no checkpoint yet, so it cannot resume; start it again"
        # With saves of several runs, the user has to name the checkpoint.
        value = newest.path if len(self._store.saves_by_run()) > 1 else True
        return f"resume_from_checkpoint={value} resumes from {newest.path}"

    @contextlib.contextmanager
    def adding_resume_hint(self) -> Iterator[None]:
        """Context manager: add to the error of a failed save how the run resumes."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self.resume_hint()}") from error

    # --- when to save

    def save_epoch(self, trainer: Trainer, *, epoch: int) -> None:
        """Save a checkpoint and export the weights; exit if a stop was requested.

        After the last epoch, a checkpoint is saved only if `keep_final_state` is set.

        Raises:
            CheckpointError: saving failed; earlier saves are unchanged.
        """
        is_last = epoch + 1 >= self._settings.epochs
        if distributed.any_of_ranks(not trainer.is_finite()):
            message = (
                f"weights are NaN or infinite after epoch {epoch}, so its checkpoint is unusable;"
                " lower optimizer.lr, or set on_nonfinite_loss=stop"
            )
            self._log.event("nonfinite_weights", message, epoch=epoch)
        if not is_last or self._settings.keep_final_state:
            try:
                self._save(trainer, prints=False)
                self._wait()
            except CheckpointError as error:
                # After the last epoch, the exported weights matter more than a checkpoint.
                if not is_last:
                    raise
                log.warning("the last epoch is saved without a checkpoint: %s", error)
        self._export(trainer, epoch=epoch)
        if distributed.any_of_ranks(self.preemption.requested) and not is_last:
            # Save again, marked as preempted: resuming then restores the random state of this
            # moment, after the export, and does not look for an export newer than the checkpoint.
            self._save(trainer, prints=False, preempted=True)
            self._end_early()

    def export_missing(self, trainer: Trainer) -> None:
        """Export the last finished epoch of a resumed run if a kill prevented it."""
        progress = self._resumed.progress
        epoch = progress.epoch - 1
        checkpoint = self._store.found.checkpoint
        assert checkpoint is not None
        resumes_here = checkpoint.path.absolute().parent == self._store.path.absolute()
        # An epoch that restarts has weights from its middle, although its progress is 0.
        is_between_epochs = progress.epoch_steps == 0 and not self._resumed.restarts_epoch
        # An export has the order of the checkpoint before it. A preempted run saved once more after
        # its export, so there any order counts.
        least_order = 0 if self._resumed.saved.get("preempted") else checkpoint.order or 0

        def is_exported() -> bool:
            return any(
                (export.epoch, export.run) == (epoch, self._run) and export.order >= least_order
                for export in exports_in(self._store.exports_path)
            )

        if resumes_here and is_between_epochs and not distributed.from_rank_zero(is_exported):
            self._export(trainer, epoch=epoch)

    def save_where_due(self, trainer: Trainer, *, stop_requested: bool) -> None:
        """Save a checkpoint if the step interval has passed or a stop was requested.

        Args:
            trainer: trainer of the run.
            stop_requested: whether a rank was requested to stop before this step; ranks agreed on
                it in the step.
        """
        every = self._settings.save_every_n_steps
        # A single process has nothing to agree on, so a request during this step counts already.
        is_alone = distributed.world_size() == 1
        if stop_requested or (is_alone and self.preemption.requested):
            self._save(trainer)
            self._end_early()
        elif every and self._batches.progress.steps % every == 0:
            try:
                self._save(trainer)
            except CheckpointError as error:
                self._log_failure(error)

    def close(self) -> None:
        """Wait for an asynchronous save and stop saving. Only log its failure: the weights of the
        last epoch are exported.
        """
        try:
            self._manager.close()
        except CheckpointError as error:
            self._log_failure(error)

    # --- saves

    def _save(self, trainer: Trainer, *, prints: bool = True, preempted: bool = False) -> None:
        """Save a checkpoint; raise CheckpointError if a synchronous save failed.

        Args:
            trainer: trainer of the run.
            prints: whether to log the message, too.
            preempted: whether the run ends after this checkpoint, between two epochs.
        """
        step = self._batches.progress.steps
        # A checkpoint must not be ahead of the run log: resuming would leave a gap in the log.
        self._log.sync()
        state = {
            "run": self._run,
            "conditions": self._resumed.conditions,
            **self._batches.state_dict(),
            **{name: part.state_dict() for name, part in self._parts.items()},
            "random_states": distributed.all_gather(RandomState(self._job.device).state_dict()),
            "base": self._base_files,
            "preempted": preempted,
        }
        start = time.perf_counter()
        # Only one asynchronous save runs at a time. A failure of the last one is logged, since
        # training continued without it.
        try:
            self._wait()
        except CheckpointError as error:
            self._log_failure(error)
        tensors = {
            "model": self._job.builder.state(trainer.model),
            "optimizer": named_optimizer_state(trainer.optimizers, trainer.names_of_parameters),
        }
        self._manager.save(step, tensors, state)
        # An asynchronous save is complete only after _wait(), which removes them, too.
        if not self._settings.enable_async_checkpointing:
            self._remove_earlier_runs()
        seconds = time.perf_counter() - start
        message = f"step {step}: checkpoint saved (blocked training for {seconds:.2f} s)"
        self._log.event(
            "resume_point",
            message,
            prints=prints,
            step=step,
            path=f"step_{step}",
            seconds=round(seconds, 4),
        )

    def _export(self, trainer: Trainer, *, epoch: int) -> None:
        """Export the weights of an epoch; raise CheckpointError if it failed."""
        step = self._batches.progress.steps
        self._log.sync()
        # All ranks gather the weights, and rank 0 writes them.
        content = self._job.builder.to_save(trainer.model, self._job.cfg, device=self._job.device)

        def export() -> None:
            # The export stores the order of this checkpoint: later checkpoints are newer than it.
            newest = self._store.newest()
            order = newest.order if newest and newest.order else 0
            self._store.files.export(content, epoch=epoch, run=self._run, step=step, order=order)

        distributed.on_rank_zero(export)
        self._remove_earlier_runs()
        self._log.event("checkpoint", f"epoch {epoch} saved", epoch=epoch, steps=step)

    def _wait(self) -> None:
        """Wait for an asynchronous save; raise CheckpointError if it failed."""
        self._manager.wait()
        self._remove_earlier_runs()

    def _remove_earlier_runs(self) -> None:
        """Remove the saves that this run replaces, after its first complete save."""
        if self.replaces and distributed.from_rank_zero(
            lambda: self._store.remove_others(self._run)
        ):
            self.replaces = ""

    def _log_failure(self, error: CheckpointError) -> None:
        message = f"the run continues; this checkpoint was not saved: {error}"
        self._log.event("checkpoint_failed", message, step=self._batches.progress.steps)

    def _end_early(self) -> None:
        """Exit with the status of a preempted run, after an asynchronous save is complete."""
        self._wait()
        step = self._batches.progress.steps
        resume_hint = distributed.on_rank_zero(self.resume_hint)
        message = f"stop requested: saved at step {step}; {resume_hint}"
        self._log.event("preempted", message, step=step, exit_status=EXIT_STATUS)
        raise SystemExit(EXIT_STATUS)

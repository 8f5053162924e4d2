"""Checkpoints of a run in ``output_dir/step_N``, and an export of the weights after each epoch.

A checkpoint is written atomically, stores the name of its run, and is the only input of resuming.
It is saved before the export of its epoch. If a kill prevents an export, the run makes it on
resuming.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from omegaconf import DictConfig, ListConfig
from torch.distributed.checkpoint.stateful import Stateful

from adaptive_batch import distributed
from adaptive_batch._util import atomic_write, format_bytes
from adaptive_batch.checkpoint import (
    Checkpoint,
    CheckpointManager,
    SkippedCheckpoint,
    checkpoints_in,
    load_named_optimizer_state,
    named_optimizer_state,
    newest_complete,
    remove_folder,
)
from adaptive_batch.data import Batches
from adaptive_batch.distributed import EXIT_STATUS, Preemption
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.memory import RandomState, tensors_in
from adaptive_batch.report import started_runs

from .checks import AUTO, check_output_dir
from .job import Job
from .log import TrainingLog
from .model import Weights
from .model_files import ModelFiles, exports_in
from .resume import Found, ResumedRun
from .trainer import Trainer

log = logging.getLogger("adaptive_batch")
Part = TypeVar("Part", bound=Stateful)

_BEGIN_AGAIN = "start again (resume_from_checkpoint=False overwrite_output_dir=True)"


class FinishedError(CheckpointError):
    """A command with ``resume_from_checkpoint=auto`` finds the run finished."""


class RunFolder:
    """Saves in the output folder, including those of earlier runs; every method reads the folder
    again. For rank 0 only.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self.path = Path(cfg.output_dir)
        self.exports_path = check_output_dir(
            cfg.checkpointer.output_dir, key="checkpointer.output_dir"
        )
        self._job = self.path / "adaptive_batch" / "job.json"
        self._launch = distributed.launch_name()

    def saves_by_run(self) -> dict[str | None, list[Path]]:
        """Return the checkpoints, oldest first, and exports by run; None for saves without a
        run name.
        """
        complete, skipped = checkpoints_in(self.path)
        points: list[Checkpoint | SkippedCheckpoint] = [*complete]
        # Only of checkpoints is the order known, those of other versions among them.
        points += [point for point in skipped if point.is_ours or point.order is not None]
        points.sort(key=lambda point: point.order or 0)
        saves: dict[str | None, list[Path]] = {}
        for save in (*points, *exports_in(self.exports_path)):
            saves.setdefault(save.run, []).append(save.path)
        return saves

    def newest(self, runs: Collection[str | None] | None = None) -> Checkpoint | None:
        """Return the newest checkpoint of some runs, or of all, without reading its large files;
        None if there is none.
        """
        complete, _ = checkpoints_in(self.path)
        points = [point for point in complete if runs is None or point.run in runs]
        return max(points, key=lambda point: (point.order, point.step), default=None)

    def remove_others(self, run: str) -> bool:
        """Remove the saves of other runs if this run has a save; return whether it has one."""
        is_exported = any(export.run == run for export in exports_in(self.exports_path))
        if not (is_exported or self.newest([run])):
            return False
        for owner, paths in self.saves_by_run().items():
            if owner != run:
                for path in paths:
                    remove_folder(path)
        return True

    # --- start of a run

    def find(self) -> Found:
        """Find the checkpoint to resume from.

        Raises:
            CheckpointError: the run resumes, but the folder has no complete checkpoint, or has
                saves of two runs.
            FinishedError: the last epoch was saved without a checkpoint.
            SettingError: the given path is not a checkpoint.
        """
        restarted = self._find_of_launch()
        if restarted is not None:
            return restarted
        asked = self._cfg.resume_from_checkpoint
        if isinstance(asked, str) and asked != AUTO:
            return self._find_named(Path(asked).absolute())
        saves = self.saves_by_run()
        if not asked or (asked == AUTO and not saves):
            return Found()
        runs = {run: paths for run, paths in saves.items() if run is not None}
        newest = self.newest(runs)
        if len(runs) > 1:
            example = newest.path if newest else "OUTPUT_DIR/step_100"
            raise CheckpointError(
                f"{self.path} holds saves of {len(runs)} runs: {_described(runs)}; name the"
                f" checkpoint to resume from, as in resume_from_checkpoint={example}"
            )
        newest_place = (newest.order, newest.step) if newest else (0, 0)
        for export in exports_in(self.exports_path):
            is_last = export.run in runs and export.epoch + 1 >= self._cfg.epochs
            if asked == AUTO and is_last and (export.order, export.step) > newest_place:
                raise FinishedError(
                    f"nothing to train: run {export.run} is done ({export.path}); only a run with"
                    " keep_final_state=True continues if you raise epochs"
                )
        return self._newest(*checkpoints_in(self.path))

    def _find_of_launch(self) -> Found | None:
        """Find the newest checkpoint of a run that torchrun restarted; None if there is none."""
        try:
            job = json.loads(self._job.read_text())
            # An earlier launch wrote the file; this one ended before writing its own.
            if job["launch"] != self._launch:
                return None
            complete, skipped = checkpoints_in(self.path)
            own = [point for point in complete if point.run == job["run"]]
            return self._newest(own, skipped)
        except (OSError, ValueError, KeyError, CheckpointError):
            return None

    def _find_named(self, path: Path) -> Found:
        """Find the checkpoint at a path, which may be in the folder of another run."""
        complete, skipped = checkpoints_in(path.parent)
        named = [point for point in complete if point.path.absolute() == path]
        damaged = [point for point in skipped if point.path.absolute() == path]
        if not named and not damaged:
            remedy = "it is not a checkpoint; give a folder such as OUTPUT_DIR/step_100"
            raise SettingError("resume_from_checkpoint", str(path), remedy)
        return self._newest(named, damaged)

    def _newest(self, complete: list[Checkpoint], skipped: list[SkippedCheckpoint]) -> Found:
        newest, skipped = newest_complete(complete, skipped)
        passed_over = [point.describe() for point in skipped]
        if newest is None and passed_over:
            raise CheckpointError(
                f"{self.path} holds nothing complete to resume from ({'; '.join(passed_over)});"
                f" restore the files, or {_BEGIN_AGAIN}"
            )
        if newest is None:
            raise CheckpointError(
                f"{self.path} holds no checkpoint (step_N): check output_dir, or set"
                " resume_from_checkpoint=False to start. To train on from the weights of a finished"
                " run, or of torchtune's own recipe, whose recipe_state.pt cannot be resumed, give"
                " them as checkpointer.checkpoint_dir with another output_dir"
            )
        starts = started_runs(self.path)
        # Without a run log, no later run is known.
        is_of_latest_run = not starts or starts[-1] == newest.run
        if any(point.is_ours for point in skipped) and not is_of_latest_run:
            # The damaged folders may hold all of the latest run: do not resume an earlier one.
            raise CheckpointError(
                f"{'; '.join(passed_over)}; {newest.path} belongs to an earlier run: restore"
                f" the damaged files, remove them to resume the earlier run, or {_BEGIN_AGAIN}"
            )
        return Found(newest, newest.load_small_state(), tuple(passed_over))

    # --- one folder, one run

    def begin(self, run: str, *, overwrites: bool) -> str:
        """Record the run for restarts by torchrun; arguments and errors as in :meth:`check`.

        Returns:
            Description of the saves to replace; empty if there are none.
        """
        others = self.check(run, overwrites=overwrites)
        if self._launch is not None:
            atomic_write(self._job, json.dumps({"run": run, "launch": self._launch}))
        return _described(others) if overwrites else ""

    def check(self, run: str, *, overwrites: bool) -> Mapping[str | None, list[Path]]:
        """Return the saves of other runs; refuse a run that may not start in this folder.

        Args:
            run: name of the run that starts or resumes.
            overwrites: whether the run may replace saves of other runs.

        Raises:
            SettingError: the folder has saves of another run, or the run would remove its own base
                model.
        """
        saves = self.saves_by_run()
        others = {owner: paths for owner, paths in saves.items() if owner != run}
        if others and not overwrites and run not in saves:
            newest = self.newest(others)
            resumes = f" resume it (resume_from_checkpoint={newest.path})," if newest else ""
            remedy = (
                f"it holds the saves of {_described(others)};{resumes} give another folder, or"
                " replace them (overwrite_output_dir=True)"
            )
            raise SettingError("output_dir", str(self.path), remedy)
        if overwrites:
            self._refuse_removing_base(others)
        return others

    def _refuse_removing_base(self, others: Mapping[str | None, list[Path]]) -> None:
        folders = [path.resolve() for paths in others.values() for path in paths]
        for key, path in self._paths_read():
            if any(map(path.resolve().is_relative_to, folders)):
                remedy = (
                    "overwrite_output_dir=True would remove it, since an earlier run saved it in"
                    f" {self.path}; give another output_dir"
                )
                raise SettingError(key, str(path), remedy)

    def _paths_read(self) -> Iterator[tuple[str, Path]]:
        """Yield the keys and paths of the models and the tokenizer that the run begins with."""
        for block in ("checkpointer", "ref_checkpointer", "teacher_checkpointer", "tokenizer"):
            values: Any = self._cfg.get(block) or {}
            for key in ("checkpoint_dir", "path"):
                if isinstance(values.get(key), str):
                    yield f"{block}.{key}", Path(values[key])
            names = values.get("checkpoint_files")
            # A block describes the files by a pattern.
            for name in names if isinstance(names, ListConfig) else ():
                yield f"{block}.checkpoint_files", Path(values.get("checkpoint_dir", ""), str(name))


def _described(saves_by_run: Mapping[Any, list[Path]]) -> str:
    """Format runs and the names of their saves."""
    return ", ".join(
        f"{f'run {run}' if run else 'an unknown run'} ({', '.join(path.name for path in paths)})"
        for run, paths in saves_by_run.items()
    )


class RunStore(Weights):
    """Finds and loads the checkpoint that a run starts from.

    Rank 0 searches for it and broadcasts the result. All ranks read it from a shared file system.
    The number of ranks may differ from the save.

    Args:
        job: job of the run.

    Attributes:
        folder: saves in the output folder.
        files: files of the base model and of exports, on rank 0; not in a preview.
        found: checkpoint and state at the start of the run.
        is_divided: whether each rank reads its own shard of the trained weights.

    Raises:
        CheckpointError: the run resumes, but the folder has no complete checkpoint, or has saves of
            two runs.
        SettingError: the given path is not a checkpoint.
    """

    def __init__(self, job: Job) -> None:
        self._keeps_base = job.builder.keeps_base
        self._settings = job.settings
        self.folder = RunFolder(job.cfg)
        self._group = distributed.host_group()
        self.found = distributed.from_rank_zero(self.folder.find)
        self.is_divided = self.found.point is not None
        # A preview needs no weights.
        if not job.settings.preview:
            files = distributed.on_rank_zero(lambda: ModelFiles(job.cfg.checkpointer))
            # None on other ranks, which do not use it.
            self.files = cast(ModelFiles, files)

    def show_refusal(self, run: str) -> None:
        """Print the error of a run that may not start in the output folder."""
        if distributed.is_rank_zero():
            try:
                self.folder.check(run, overwrites=self._settings.overwrite_output_dir)
            except SettingError as error:
                print(f"without preview, this is refused: {error}")

    def load_weights(self) -> Mapping[str, Any]:
        """Load the state dict of the base model on rank 0, with torchtune's names.

        It is empty on other ranks, and if a checkpoint holds the whole model.
        """
        # torchtune's checkpointer needs to read the base model before it can save.
        weights = distributed.on_rank_zero(lambda: self.files.load_weights()) or {}
        return {} if self.is_divided and not self._keeps_base else weights

    def load_divided(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's shards of a model from the checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be read, or its weights have other shapes.
        """
        assert self.found.point is not None
        try:
            self.found.point.load_into({"model": dict(state)}, process_group=self._group)
        except CheckpointError as error:
            if "model" not in self._settings.resume_allow_changes:
                raise
            remedy = "resume_allow_changes=[model] allows only changes that keep all shapes"
            raise CheckpointError(f"{error}; {remedy}: resume with the saved model") from error

    def load_optimizer(self, trainer: Trainer) -> None:
        """Load the optimizer state of the checkpoint, if any."""
        if self.found.point:
            state = self.found.point.load_optimizer(
                trainer.optimizers, trainer.names_of_parameters, process_group=self._group
            )
            load_named_optimizer_state(state, trainer.optimizers, trainer.names_of_parameters)


class Saver:
    """Saves a run after each epoch, at a step interval, and on a stop request.

    The constructor begins the run in its folder; torchrun's restarts resume it.

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
        self._folder = store.folder
        self._resumed = resumed
        self._run = resumed.name
        self._batches = batches
        self._log = log
        self.preemption = Preemption(same_within=same_within)
        # Keyed by their name in checkpoints.
        self._parts: dict[str, Any] = {}
        self.replaces = distributed.from_rank_zero(
            lambda: self._folder.begin(self._run, overwrites=self._settings.overwrite_output_dir)
        )
        distributed.on_rank_zero(lambda: store.files.clean_up())
        self._base = None
        if job.builder.keeps_base:
            saved = store.found.state.get("base")
            # Every checkpoint of adapters has the checksums of the base model's files.
            self._base = distributed.on_rank_zero(lambda: store.files.check_base(saved))
        keep_last = self._settings.keep_last_n_checkpoints
        if self._settings.save_every_n_steps is None:
            # Only the newest checkpoint of an epoch is needed.
            keep_last = 1
        self._manager = CheckpointManager(
            self._folder.path,
            run=self._run,
            keep_last=keep_last,
            asynchronous=self._settings.enable_async_checkpointing,
            process_group=distributed.host_group(),
        )

    def check(self, trainer: Trainer) -> None:
        """Raise before training if the run could not be saved.

        Raises:
            SettingError: the disk has too little free space, or the optimizer state cannot be
                saved.
        """
        num_bytes = self._job.builder.num_bytes_saved(trainer.model, self._job.cfg)

        def check_disk() -> None:
            folder = self._folder.exports_path.absolute()
            # A custom checkpointer may create the folder with its first file.
            nearest = next(path for path in (folder, *folder.parents) if path.exists())
            free = shutil.disk_usage(nearest).free
            if free < num_bytes:
                remedy = (
                    f"an epoch takes {format_bytes(num_bytes)}, but only {format_bytes(free)} are"
                    " free; free disk space, or give another folder"
                )
                raise SettingError("output_dir", str(folder), remedy)

        distributed.on_rank_zero(check_disk)
        try:
            named_optimizer_state(trainer.optimizers, trainer.names_of_parameters)
        except CheckpointError as error:
            component = str(self._job.cfg.optimizer._component_)
            raise SettingError("optimizer", component, str(error)) from error

    def restore(self, name: str, part: Part) -> Part:
        """Register a part, and load its state from the checkpoint."""
        self.register(name, part)
        state = self._resumed.state_of(name)
        if state is not None:
            part.load_state_dict(state)
        return part

    def register(self, name: str, part: Part) -> Part:
        """Save the state of a part under a name in each checkpoint."""
        self._parts[name] = part
        return part

    def after_end(self) -> str:
        """Return how a run that ends now resumes, as the end of a sentence; on rank 0."""
        # An asynchronous save may still complete. With several ranks, all would have to wait
        # for it, and only rank 0 calls this method.
        with contextlib.suppress(CheckpointError):
            if distributed.world_size() == 1:
                self._wait()
        newest = self._folder.newest([self._run])
        if newest is None:
            return "this run has no checkpoint yet, so it cannot resume; start it again"
        # With saves of several runs, the user has to name the checkpoint.
        value = newest.path if len(self._folder.saves_by_run()) > 1 else True
        return f"resume_from_checkpoint={value} resumes from {newest.path}"

    # --- when to save

    def save_epoch(self, trainer: Trainer, *, epoch: int) -> None:
        """Save a checkpoint unless it is not wanted at the end of training, and export the weights.
        Exit if a stop was requested.

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
        try:
            if not is_last or self._settings.keep_final_state:
                try:
                    self._save(trainer, prints=False)
                    self._wait()
                except CheckpointError as error:
                    if not is_last:
                        raise
                    log.warning("the last epoch is saved without a checkpoint: %s", error)
            self._export(trainer, epoch=epoch)
        except CheckpointError as error:
            after_end = distributed.from_rank_zero(self.after_end)
            raise CheckpointError(f"{error}; {after_end}") from error
        if distributed.any_of_ranks(self.preemption.requested) and not is_last:
            # Save again: resuming from this checkpoint restores the random state after the epoch.
            self._save(trainer, prints=False, preempted=True)
            self._end_early()

    def export_missing(self, trainer: Trainer) -> None:
        """Export the last finished epoch of a resumed run if a kill prevented it."""
        progress = self._resumed.progress
        epoch = progress.epoch - 1
        point = self._store.found.point
        assert point is not None
        resumes_here = point.path.absolute().parent == self._folder.path.absolute()
        # If the epoch starts again, the weights are from within it.
        in_mid_epoch = progress.epoch_steps > 0 or self._resumed.begins_epoch_again
        # A run that was asked to end saved once more after the export.
        least = 0 if self._resumed.saved.get("preempted") else point.order

        def is_exported() -> bool:
            return any(
                (export.epoch, export.run) == (epoch, self._run) and export.order >= least
                for export in exports_in(self._folder.exports_path)
            )

        if resumes_here and not in_mid_epoch and not distributed.from_rank_zero(is_exported):
            self._export(trainer, epoch=epoch)

    def save_where_due(self, trainer: Trainer, *, stop_requested: bool) -> None:
        """Save a checkpoint if the step interval has passed or a stop was requested.

        Args:
            trainer: trainer of the run.
            stop_requested: whether a rank was requested to stop; used with several ranks.
        """
        every = self._settings.save_every_n_steps
        if distributed.world_size() == 1:
            stop_requested = self.preemption.requested
        if stop_requested:
            self._save(trainer)
            self._end_early()
        elif every and self._batches.progress.steps % every == 0:
            try:
                self._save(trainer)
            except CheckpointError as error:
                self._log_failure(error)

    def close(self) -> None:
        """Wait for an asynchronous save and stop saving; raise CheckpointError if it failed."""
        self._manager.close()

    # --- saves

    def _save(self, trainer: Trainer, *, prints: bool = True, **facts: Any) -> None:
        """Save a checkpoint; raise CheckpointError if a synchronous save failed."""
        step = self._batches.progress.steps
        self._log.sync()
        state = {
            "run": self._run,
            "conditions": self._resumed.conditions,
            **self._batches.state_dict(),
            **{name: part.state_dict() for name, part in self._parts.items()},
            "random_states": distributed.all_gather(RandomState(self._job.device).state_dict()),
            "base": self._base,
            **facts,
        }
        start = time.perf_counter()
        try:
            self._wait()
        except CheckpointError as error:
            self._log_failure(error)
        tensors = {
            "model": self._job.builder.state(trainer.model),
            "optimizer": named_optimizer_state(trainer.optimizers, trainer.names_of_parameters),
        }
        self._manager.save(step, tensors, state)
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
        content = self._job.builder.to_save(trainer.model, self._job.cfg, device=self._job.device)

        def export() -> None:
            num_bytes = sum(tensor.nbytes for tensor in tensors_in(content))
            self._manager.make_room(num_bytes)
            newest = self._folder.newest()
            self._store.files.export(
                content,
                num_bytes=num_bytes,
                epoch=epoch,
                run=self._run,
                step=step,
                order=newest.order if newest else 0,
            )

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
            lambda: self._folder.remove_others(self._run)
        ):
            self.replaces = ""

    def _log_failure(self, error: CheckpointError) -> None:
        message = f"training continues; this checkpoint was not saved: {error}"
        self._log.event("checkpoint_failed", message, step=self._batches.progress.steps)

    def _end_early(self) -> None:
        self._wait()
        step = self._batches.progress.steps
        resumes = distributed.on_rank_zero(self.after_end)
        message = f"stop requested: saved at step {step}; {resumes}"
        self._log.event("preempted", message, step=step, exit_status=EXIT_STATUS)
        raise SystemExit(EXIT_STATUS)

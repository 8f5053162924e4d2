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
from collections.abc import Callable, Collection, Iterator, Mapping
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
from adaptive_batch.report import read_records

from .checks import AUTO
from .data import Data
from .job import Job
from .log import TrainingLog
from .model import Weights
from .model_files import ModelFiles, exports_in
from .resume import Found, ResumedRun
from .settings import Settings
from .trainer import Trainer

log = logging.getLogger("adaptive_batch")
Part = TypeVar("Part", bound=Stateful)

_BEGIN_AGAIN = "start again (resume_from_checkpoint=False overwrite_output_dir=True)"


class RunFolder:
    """Saves in the output folder, including those of earlier runs; every method reads the folder
    again. For rank 0 only.

    Args:
        cfg: configuration of the run.
        keeps_base: whether checkpoints hold only adapters, and resuming reads the base model again.
    """

    def __init__(self, cfg: DictConfig, *, keeps_base: bool) -> None:
        self._cfg = cfg
        self._keeps_base = keeps_base
        self.path = Path(cfg.output_dir)
        self.exports_path = Path(cfg.checkpointer.output_dir)
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

    def newest_of(self, runs: Collection[str | None]) -> Path | None:
        """Return the newest checkpoint of some runs, or None, without reading its large files."""
        complete, _ = checkpoints_in(self.path)
        points = [point for point in complete if point.run in runs]
        points.sort(key=lambda point: (point.order, point.step))
        return points[-1].path if points else None

    def newest_order(self) -> int:
        """Return the order of the newest resume point of any run; 0 where there is none."""
        complete, _ = checkpoints_in(self.path)
        return max((point.order for point in complete), default=0)

    def remove_others(self, run: str) -> bool:
        """Remove the saves of other runs if this run has a save; return whether it has one."""
        is_exported = any(export.run == run for export in exports_in(self.exports_path))
        if not (is_exported or self.newest_of([run])):
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
            SettingError: the run resumes from another kind of fine-tuning, or the given path is not
                a checkpoint.
        """
        restarted = self._find_of_launch()
        if restarted is not None:
            return restarted
        asked = self._cfg.resume_from_checkpoint
        recipe_checkpoint = self._cfg.checkpointer.get("recipe_checkpoint")
        if asked and recipe_checkpoint:
            remedy = (
                "torchtune's recipe_state is not read; remove it: resuming finds the checkpoint"
            )
            raise SettingError("checkpointer.recipe_checkpoint", recipe_checkpoint, remedy)
        if isinstance(asked, str) and asked != AUTO:
            return self._same_kind(self._find_named(Path(asked).absolute()))
        saves = self.saves_by_run()
        if not asked or (asked == AUTO and not saves):
            return Found()
        runs = {run: paths for run, paths in saves.items() if run is not None}
        if len(runs) > 1:
            example = self.newest_of(runs) or "OUTPUT_DIR/step_100"
            raise CheckpointError(
                f"{self.path} holds saves of {len(runs)} runs: {_described(runs)}; name the"
                f" checkpoint to resume from, as in resume_from_checkpoint={example}"
            )
        return self._same_kind(self._newest(*checkpoints_in(self.path)))

    def _find_of_launch(self) -> Found | None:
        """Find the newest checkpoint of a run that torchrun restarted; None if there is none."""
        try:
            job = json.loads(self._job.read_text())
            # An earlier launch wrote the file; this one ended before writing its own.
            if job["launch"] != self._launch:
                return None
            complete, skipped = checkpoints_in(self.path)
            own = [point for point in complete if point.run == job["run"]]
            return self._same_kind(self._newest(own, skipped))
        except (OSError, ValueError, KeyError, CheckpointError):
            return None

    def _find_named(self, path: Path) -> Found:
        """Find the checkpoint at a path, which may be in the folder of another run."""
        complete, skipped = checkpoints_in(path.parent)
        named = [point for point in complete if point.path.absolute() == path]
        damaged = [point for point in skipped if point.path.absolute() == path]
        if named or damaged:
            return self._newest(named, damaged)
        remedy = "it is not a checkpoint; give a folder such as OUTPUT_DIR/step_100"
        if complete:
            remedy += f"; found {', '.join(str(point.path) for point in complete)}"
        raise SettingError("resume_from_checkpoint", self._cfg.resume_from_checkpoint, remedy)

    def _newest(self, complete: list[Checkpoint], skipped: list[SkippedCheckpoint]) -> Found:
        newest, skipped = newest_complete(complete, skipped)
        passed_over = [point.describe() for point in skipped]
        if newest is None:
            raise CheckpointError(self._nothing_complete(passed_over))
        # The damaged folders may hold all of the latest run: do not silently resume an earlier one.
        if any(point.is_ours for point in skipped) and self._last_run() not in (None, newest.run):
            raise CheckpointError(
                f"{'; '.join(passed_over)}; {newest.path} belongs to an earlier run: restore the"
                f" damaged files, remove them to resume the earlier run, or {_BEGIN_AGAIN}"
            )
        return Found(newest, newest.load_small_state(), tuple(passed_over))

    def _last_run(self) -> str | None:
        """Return the run that started last in the folder; None if unknown."""
        path = self.path / "adaptive_batch" / "run.jsonl"
        records = read_records(path) if path.exists() else []
        starts = [record["run"] for record in records if record["kind"] == "start"]
        return starts[-1] if starts else None

    def _nothing_complete(self, passed_over: list[str]) -> str:
        """Describe why the run cannot resume."""
        if passed_over:
            return (
                f"{self.path} holds nothing complete to resume from ({'; '.join(passed_over)});"
                f" restore the files, or {_BEGIN_AGAIN}"
            )
        exports = exports_in(self.exports_path)
        recipe_state = self.exports_path / "recipe_state" / "recipe_state.pt"
        if recipe_state.exists():
            return (
                f"{recipe_state} was saved by torchtune's own recipe, and only that recipe can"
                " resume from it; start from the weights of its last epoch"
                " (checkpointer.checkpoint_dir) with another output_dir and"
                " resume_from_checkpoint=False"
            )
        if exports:
            return (
                f"{self.path} holds the weights of a finished run, but no checkpoint: continue from"
                " its weights with another output_dir and resume_from_checkpoint=False"
            )
        return (
            f"{self.path} holds no checkpoint (step_N): check output_dir, or set"
            " resume_from_checkpoint=False to start, for example after a run that ended before its"
            f" first save; {AUTO} resumes or starts"
        )

    def _same_kind(self, found: Found) -> Found:
        """Raise if the run trains adapters and the checkpoint holds all weights, or the reverse."""
        if ("base" in found.state) == self._keeps_base:
            return found
        content = "weights without adapters"
        trained = "adapters"
        recipe = "adaptive_full_finetune"
        model = "without adapters"
        if "base" in found.state:
            content = "adapters"
            trained = "weights"
            recipe = "adaptive_lora_finetune"
            model = "with adapters"
        assert found.point is not None
        remedy = (
            f"{found.point.path} holds {content}, but this run trains {trained}; resume it with"
            f" `tune run {recipe}`, or, in adaptive_dpo and adaptive_distill, with a model"
            f" {model}; or give another output_dir"
        )
        raise SettingError("resume_from_checkpoint", self._cfg.resume_from_checkpoint, remedy)

    # --- one folder, one run

    def begin(self, run: str, *, overwrites: bool) -> str:
        """Record the run for restarts by torchrun; refuse a run that may not start in this folder.

        Args:
            run: name of the run that starts or resumes.
            overwrites: whether the run may replace saves of other runs.

        Returns:
            Description of the saves to replace; empty if there are none.

        Raises:
            SettingError: the folder has saves of another run, the run would remove its own base
                model, or the run that ``auto`` resumes is done.
        """
        saves = self.saves_by_run()
        others = {owner: paths for owner, paths in saves.items() if owner != run}
        if others and not overwrites and run not in saves:
            newest = self.newest_of(others)
            resumes = f" resume it (resume_from_checkpoint={newest})," if newest else ""
            remedy = (
                f"it holds the saves of {_described(others)};{resumes} give another folder, or"
                " replace them (overwrite_output_dir=True)"
            )
            raise SettingError("output_dir", str(self.path), remedy)
        if overwrites:
            self._refuse_removing_base(others)
        if run in saves and self._cfg.resume_from_checkpoint == AUTO:
            self._refuse_done(run)
        if self._launch is not None:
            atomic_write(self._job, json.dumps({"run": run, "launch": self._launch}))
        return _described(others) if overwrites else ""

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
            values = self._cfg.get(block) or {}
            for key in ("checkpoint_dir", "adapter_checkpoint", "path"):
                if isinstance(values.get(key), str):
                    yield f"{block}.{key}", Path(values[key])
            names = values.get("checkpoint_files")
            # A block describes the files by a pattern.
            for name in names if isinstance(names, ListConfig) else ():
                yield f"{block}.checkpoint_files", Path(values.get("checkpoint_dir", ""), str(name))

    def _refuse_done(self, run: str) -> None:
        exports = [export for export in exports_in(self.exports_path) if export.run == run]
        for last in exports[-1:]:
            if last.ends_run and last.epoch + 1 >= self._cfg.epochs:
                remedy = (
                    f"run {run} is done: {last.path.name} was its last; raise epochs to train on,"
                    " or give another output_dir to begin a new run"
                )
                raise SettingError("resume_from_checkpoint", AUTO, remedy)


def _described(saves_by_run: Mapping[Any, list[Path]]) -> str:
    """Format runs and the names of their saves."""
    return ", ".join(
        f"{f'run {run}' if run else 'an unknown run'} ({', '.join(path.name for path in paths)})"
        for run, paths in saves_by_run.items()
    )


class RunStore(Weights):
    """Loads the checkpoint that a run starts from, and saves the run.

    Rank 0 searches for the checkpoint and broadcasts the result. All ranks read it from a shared
    file system. The number of ranks may differ from the save.

    Args:
        cfg: configuration of the run.
        settings: validated settings of the configuration.
        keeps_base: whether checkpoints hold only adapters, and resuming reads the base model again;
            see :class:`.FullModel`.
        on_failure: function that receives the error of a failed asynchronous save.

    Attributes:
        found: checkpoint and state at the start of the run.
        is_divided: whether each rank reads its own shard of the trained weights.
        replaces: description of other runs' saves that the first save of this run removes.

    Raises:
        CheckpointError: the run resumes, but the folder has no complete checkpoint, or has saves of
            two runs.
        SettingError: the run resumes from another kind of fine-tuning.
    """

    def __init__(
        self,
        cfg: DictConfig,
        settings: Settings,
        *,
        keeps_base: bool = False,
        on_failure: Callable[[CheckpointError], object] = lambda error: None,
    ) -> None:
        self._cfg = cfg
        self._saving = settings.saving
        self._keeps_base = keeps_base
        self._on_failure = on_failure
        self._folder = RunFolder(cfg, keeps_base=keeps_base)
        self._group = distributed.host_group()
        self.found = distributed.from_rank_zero(self._folder.find)
        self.is_divided = self.found.point is not None
        self.replaces = ""
        self._run: str | None = self.found.state.get("run")
        self._base: dict[str, dict[str, int]] = {}
        self._manager: CheckpointManager | None = None
        # A preview needs no weights.
        if not settings.preview:
            files = distributed.on_rank_zero(lambda: ModelFiles(cfg.checkpointer))
            # None on other ranks, which do not use it.
            self._files = cast(ModelFiles, files)

    @property
    def resumes_here(self) -> bool:
        """True if the run resumes from a checkpoint of its own folder."""
        point = self.found.point
        return point is not None and point.path.absolute().parent == self._folder.path.absolute()

    def resume(self, job: Job, data: Data, *, seed: int) -> ResumedRun:
        """Create the state of a new or resumed run; see :class:`.ResumedRun`."""
        return ResumedRun(job, data, self.found, seed=seed)

    def saver(self, *parts: Any, same_within: float) -> Saver:
        """Create the saver of the run from arguments of :class:`Saver`."""
        return Saver(self, *parts, same_within=same_within)

    def begin(self, run: str) -> None:
        """Start to save under the name of a run; torchrun's restarts resume it.

        With adapters, read the files of the base model: every checkpoint stores their checksums.

        Raises:
            CheckpointError: the base model differs from that of the checkpoint.
            SettingError: the folder has saves of another run.
        """
        self._run = run
        overwrites = self._saving.overwrite_output_dir
        self.replaces = distributed.from_rank_zero(
            lambda: self._folder.begin(run, overwrites=overwrites)
        )
        distributed.on_rank_zero(lambda: self._files.clean_up())
        if self._keeps_base:
            saved = self.found.state.get("base")
            self._base = distributed.on_rank_zero(lambda: self._files.check_base(saved)) or {}
        keep_last = self._saving.keep_last_n_checkpoints
        if self._saving.save_every_n_steps is None:
            # Only the newest checkpoint of an epoch is needed.
            keep_last = 1
        self._manager = CheckpointManager(
            self._folder.path,
            run=run,
            keep_last=keep_last,
            asynchronous=self._saving.enable_async_checkpointing,
            process_group=self._group,
        )

    def after_end(self) -> str:
        """Return how a run that ends now resumes, as the end of a sentence; on rank 0."""
        # An asynchronous save may still complete. With several ranks, all would have to wait
        # for it, and only rank 0 calls this method.
        with contextlib.suppress(CheckpointError):
            if distributed.world_size() == 1:
                self.wait()
        newest = self._folder.newest_of([self._run])
        if newest is None:
            return "this run has no checkpoint yet, so it cannot resume; start it again"
        # With saves of several runs, the user has to name the checkpoint.
        value = newest if len(self._folder.saves_by_run()) > 1 else True
        return f"resume_from_checkpoint={value} resumes from {newest}"

    # --- loading

    def load_weights(self) -> Mapping[str, Any]:
        """Load the state dict of the base model on rank 0, with torchtune's names.

        It is empty on other ranks, and if a checkpoint holds the whole model.
        """
        # torchtune's checkpointer needs to read the base model before it can save.
        weights = distributed.on_rank_zero(lambda: self._files.load_weights())
        if weights is None or (self.is_divided and not self._keeps_base):
            return {}
        return weights

    def load_divided(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's shards of a model from the checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be read, or its weights have other shapes.
        """
        assert self.found.point is not None
        try:
            self.found.point.load_into({"model": dict(state)}, process_group=self._group)
        except CheckpointError as error:
            if "model" not in self._saving.resume_allow_changes:
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

    # --- saving

    def check(self, trainer: Trainer, num_bytes: int) -> None:
        """Raise before training if the run could not be saved.

        Args:
            trainer: trainer of the run.
            num_bytes: bytes of the tensors of an export.

        Raises:
            SettingError: the disk has too little free space, or the optimizer state cannot be
                saved.
        """

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
            raise SettingError(
                "optimizer", str(self._cfg.optimizer._component_), str(error)
            ) from error

    def save_point(self, step: int, trainer: Trainer, *, state: Mapping[str, Any]) -> float:
        """Save a checkpoint; return the seconds that training waited.

        Raises:
            CheckpointError: a synchronous save failed; earlier saves are unchanged.
        """
        assert self._manager is not None, "no run has begun"
        start = time.perf_counter()
        try:
            self.wait()
        except CheckpointError as error:
            self._on_failure(error)
        small_state = dict(state)
        if self._keeps_base:
            small_state["base"] = self._base
        optimizer = named_optimizer_state(trainer.optimizers, trainer.names_of_parameters)
        content = {"model": trainer.model_state(), "optimizer": optimizer}
        self._manager.save(step, content, small_state)
        if not self._saving.enable_async_checkpointing:
            self._remove_earlier_runs()
        return time.perf_counter() - start

    def export(self, trainer: Trainer, *, epoch: int, step: int, ends_run: bool) -> None:
        """Export the weights of an epoch.

        Raises:
            CheckpointError: saving failed; earlier saves are unchanged.
        """
        content = trainer.to_save()

        def export() -> None:
            assert self._manager is not None, "no run has begun"
            assert self._run is not None
            num_bytes = sum(tensor.nbytes for tensor in tensors_in(content))
            self._manager.make_room(num_bytes)
            self._files.export(
                content,
                num_bytes=num_bytes,
                epoch=epoch,
                run=self._run,
                step=step,
                order=self._folder.newest_order(),
                ends_run=ends_run,
            )

        distributed.on_rank_zero(export)
        self._remove_earlier_runs()

    def is_exported(self, epoch: int) -> bool:
        """Return whether this run has exported the weights of an epoch, which it has finished with
        the resume point that it begins with; a collective.
        """
        point = self.found.point
        assert point is not None
        # A run that is asked to end saves once more after the export.
        least = 0 if self.found.state.get("preempted") else point.order

        def is_there() -> bool:
            return any(
                (export.epoch, export.run) == (epoch, self._run) and export.order >= least
                for export in exports_in(self._folder.exports_path)
            )

        return distributed.from_rank_zero(is_there)

    def wait(self) -> None:
        """Wait for an asynchronous save; raise CheckpointError if it failed."""
        if self._manager is not None:
            self._manager.wait()
            self._remove_earlier_runs()

    def close(self) -> None:
        """Wait for an asynchronous save and stop saving; raise CheckpointError if it failed."""
        if self._manager is not None:
            self._manager.close()

    def _remove_earlier_runs(self) -> None:
        """Remove the saves that this run replaces, after its first complete save."""
        run = self._run
        if not self.replaces or run is None:
            return
        if distributed.from_rank_zero(lambda: self._folder.remove_others(run)):
            self.replaces = ""


class Saver:
    """Saves a run after each epoch, at a step interval, and on a stop request.

    Args:
        store: store that writes the files.
        job: job of the run.
        resumed: state at the start of the run.
        batches: steps and progress of the run.
        log: log of each save.
        same_within: see :class:`.Preemption`.

    Attributes:
        preemption: context that records a request to stop this process.
    """

    def __init__(
        self,
        store: RunStore,
        job: Job,
        resumed: ResumedRun,
        batches: Batches,
        log: TrainingLog,
        *,
        same_within: float,
    ) -> None:
        self._job = job
        self._saving = job.settings.saving
        self._epochs = job.settings.epochs
        self._store = store
        self._resumed = resumed
        self._batches = batches
        self._log = log
        self.preemption = Preemption(same_within=same_within)
        # Keyed by their name in checkpoints.
        self._parts: dict[str, Any] = {}

    def add(self, name: str, part: Part) -> Part:
        """Save a part under a name, and load its state from the checkpoint."""
        self.keep(name, part)
        state = self._resumed.state_of(name)
        if state is not None:
            part.load_state_dict(state)
        return part

    def keep(self, name: str, part: Part) -> Part:
        """Save a part under a name; its state is already loaded."""
        self._parts[name] = part
        return part

    def save_epoch(self, trainer: Trainer, *, epoch: int) -> None:
        """Save a checkpoint unless it is not wanted at the end of training, and export the weights.
        Exit if a stop was requested.

        Raises:
            CheckpointError: saving failed; earlier saves are unchanged.
        """
        is_last = epoch + 1 >= self._epochs
        step = self._batches.progress.steps
        if distributed.any_of_ranks(not trainer.is_finite()):
            message = (
                f"weights are NaN or infinite after epoch {epoch}, so its checkpoint is unusable;"
                " lower optimizer.lr, or set on_nonfinite_loss=stop"
            )
            self._log.event("nonfinite_weights", message, epoch=epoch)
        try:
            if not is_last or self._saving.keep_final_state:
                try:
                    self._save_point(trainer, prints=False)
                    self._store.wait()
                except CheckpointError as error:
                    if not is_last:
                        raise
                    log.warning("the last epoch is saved without a checkpoint: %s", error)
            self._export(trainer, epoch=epoch, step=step, ends_run=is_last)
        except CheckpointError as error:
            after_end = distributed.from_rank_zero(self._store.after_end)
            raise CheckpointError(f"{error}; {after_end}") from error
        if distributed.any_of_ranks(self.preemption.requested) and not is_last:
            # Save again: resuming from this checkpoint restores the random state after the epoch.
            self._save_point(trainer, prints=False, preempted=True)
            self._store.wait()
            self._end_early()

    def export_missing(self, trainer: Trainer) -> None:
        """Export the last finished epoch of a resumed run if a kill prevented it."""
        progress = self._resumed.progress
        epoch = progress.epoch - 1
        # If the epoch starts again, the weights are from within it.
        in_mid_epoch = progress.epoch_steps > 0 or self._resumed.begins_epoch_again
        if in_mid_epoch or not self._store.resumes_here or self._store.is_exported(epoch):
            return
        ends_run = self._resumed.saved["epochs"] == progress.epoch
        self._export(trainer, epoch=epoch, step=progress.steps, ends_run=ends_run)

    def save_where_due(self, trainer: Trainer, *, stop_requested: bool) -> None:
        """Save a checkpoint if the step interval has passed or a stop was requested.

        Args:
            trainer: trainer of the run.
            stop_requested: whether a rank was requested to stop; used with several ranks.
        """
        every = self._saving.save_every_n_steps
        if distributed.world_size() == 1:
            stop_requested = self.preemption.requested
        if not (stop_requested or (every and self._batches.progress.steps % every == 0)):
            return
        try:
            self._save_point(trainer)
            if stop_requested:
                self._store.wait()
        except CheckpointError as error:
            if stop_requested:
                raise
            self._log.failed_save(error)
            return
        if stop_requested:
            self._end_early()

    def _save_point(self, trainer: Trainer, *, prints: bool = True, **facts: Any) -> None:
        step = self._batches.progress.steps
        self._log.sync()
        seconds = self._store.save_point(step, trainer, state={**self._state(), **facts})
        message = f"step {step}: checkpoint saved (blocked training for {seconds:.2f} s)"
        self._log.event(
            "resume_point",
            message,
            prints=prints,
            step=step,
            path=f"step_{step}",
            seconds=round(seconds, 4),
        )

    def _export(self, trainer: Trainer, *, epoch: int, step: int, ends_run: bool) -> None:
        self._log.sync()
        self._store.export(trainer, epoch=epoch, step=step, ends_run=ends_run)
        self._log.event("checkpoint", f"epoch {epoch} saved", epoch=epoch, steps=step)

    def _end_early(self) -> None:
        step = self._batches.progress.steps
        resumes = distributed.on_rank_zero(self._store.after_end)
        message = f"stop requested: saved at step {step}; {resumes}"
        self._log.event("preempted", message, step=step, exit_status=EXIT_STATUS)
        raise SystemExit(EXIT_STATUS)

    def _state(self) -> dict[str, Any]:
        """Return the state of the run without weights and optimizer, as plain values and
        tensors.
        """
        return {
            **self._resumed.state_dict(),
            "epochs": self._epochs,
            "configured_batch_size": self._job.settings.batch_size,
            "base_rate": self._parts["learning_rate"].base,
            **self._batches.state_dict(),
            **{name: part.state_dict() for name, part in self._parts.items()},
            "random_states": distributed.all_gather(RandomState(self._job.device).state_dict()),
        }

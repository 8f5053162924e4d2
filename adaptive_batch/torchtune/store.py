"""The saves of a run: resume points in ``output_dir/step_N``, and an export of the weights after
each epoch.

A resume point is complete or absent, carries the name of its run, and is all that resuming reads.
It is saved before the export of its epoch, so an export that a kill has prevented is made when the
run resumes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from omegaconf import DictConfig
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

_BEGIN_AGAIN = "begin again (resume_from_checkpoint=False overwrite_output_dir=True)"


class RunFolder:
    """The saves in the folder of a run, which earlier runs may have left too; each question reads
    the folder again. For rank zero alone.

    Args:
        cfg: configuration of the run.
        keeps_base: True where checkpoints are of adapters, on a base that is read again.
    """

    def __init__(self, cfg: DictConfig, *, keeps_base: bool) -> None:
        self._cfg = cfg
        self._keeps_base = keeps_base
        self.path = Path(cfg.output_dir)
        self.exports_path = Path(cfg.checkpointer.output_dir)
        self._job = self.path / "adaptive_batch" / "job.json"
        self._launch = distributed.launch_name()

    def saves_by_run(self) -> dict[str | None, list[Path]]:
        """Return the resume points, oldest first, and exports of each run; None is the run of those
        that do not tell.
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
        """Return the newest resume point of some runs, without reading its large files; None where
        they have none.
        """
        complete, _ = checkpoints_in(self.path)
        points = [point for point in complete if point.run in runs]
        points.sort(key=lambda point: (point.order, point.step))
        return points[-1].path if points else None

    def remove_others(self, run: str) -> bool:
        """Remove what other runs have saved, once this run has saved something; return whether it
        has.
        """
        is_exported = any(export.run == run for export in exports_in(self.exports_path))
        if not (is_exported or self.newest_of([run])):
            return False
        for owner, paths in self.saves_by_run().items():
            if owner != run:
                for path in paths:
                    remove_folder(path)
        return True

    # --- where a run begins

    def find(self) -> Found:
        """Find what this run begins with.

        Raises:
            CheckpointError: the run resumes, and nothing complete is there, or saves of two runs.
            SettingError: the run resumes, and what is there is of another kind of fine-tuning; or
                the given path is no resume point.
        """
        restarted = self._find_of_launch()
        if restarted is not None:
            return restarted
        asked = self._cfg.resume_from_checkpoint
        recipe_checkpoint = self._cfg.checkpointer.get("recipe_checkpoint")
        if asked and recipe_checkpoint:
            remedy = (
                "torchtune's recipe_state is not read; remove it: resuming finds its resume points"
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
        """Find what the run has saved that torchrun has restarted; None where that is nothing."""
        try:
            job = json.loads(self._job.read_text())
            # The file is of an earlier launch: this one was ended before it wrote its own.
            if job["launch"] != self._launch:
                return None
            complete, skipped = checkpoints_in(self.path)
            own = [point for point in complete if point.run == job["run"]]
            return self._same_kind(self._newest(own, skipped))
        except (OSError, ValueError, KeyError, CheckpointError):
            return None

    def _find_named(self, path: Path) -> Found:
        """Find the resume point of a path, which may lie in the folder of another run."""
        complete, skipped = checkpoints_in(path.parent)
        named = [point for point in complete if point.path.absolute() == path]
        damaged = [point for point in skipped if point.path.absolute() == path]
        if named or damaged:
            return self._newest(named, damaged)
        remedy = "it is no resume point; give a folder such as OUTPUT_DIR/step_100"
        if complete:
            remedy += f"; there are {', '.join(str(point.path) for point in complete)}"
        raise SettingError("resume_from_checkpoint", self._cfg.resume_from_checkpoint, remedy)

    def _newest(self, complete: list[Checkpoint], skipped: list[SkippedCheckpoint]) -> Found:
        newest, skipped = newest_complete(complete, skipped)
        passed_over = [point.describe() for point in skipped]
        if newest is None:
            raise CheckpointError(self._nothing_complete(passed_over))
        # What is damaged may be all of the latest run: resuming an earlier one would go unnoticed.
        if any(point.is_ours for point in skipped) and self._last_run() not in (None, newest.run):
            raise CheckpointError(
                f"{'; '.join(passed_over)}; {newest.path} is of an earlier run: restore what was"
                f" saved, remove it to resume the earlier run, or {_BEGIN_AGAIN}"
            )
        return Found(newest, newest.load_small_state(), tuple(passed_over))

    def _last_run(self) -> str | None:
        """Return which run was started last in the folder; None where that is not known."""
        path = self.path / "adaptive_batch" / "run.jsonl"
        records = read_records(path) if path.exists() else []
        starts = [record["run"] for record in records if record["kind"] == "start"]
        return starts[-1] if starts else None

    def _nothing_complete(self, passed_over: list[str]) -> str:
        """Return why there is nothing to resume from."""
        if passed_over:
            return (
                f"{self.path} holds nothing complete to resume from ({'; '.join(passed_over)});"
                f" restore what was saved, or {_BEGIN_AGAIN}"
            )
        exports = exports_in(self.exports_path)
        recipe_state = self.exports_path / "recipe_state" / "recipe_state.pt"
        if recipe_state.exists():
            return (
                f"{recipe_state} was saved by torchtune's own recipe, which alone can resume from"
                " it; begin from the weights of its last epoch (checkpointer.checkpoint_dir) with"
                " another output_dir and resume_from_checkpoint=False"
            )
        if exports:
            return (
                f"{self.path} holds the weights of a run that is done, and no resume point: train"
                " on from its weights with another output_dir and resume_from_checkpoint=False"
            )
        return (
            f"{self.path} holds no resume point (step_N): check output_dir, or set"
            " resume_from_checkpoint=False to begin, as for a run that was ended before its first"
            f" save; {AUTO} does either"
        )

    def _same_kind(self, found: Found) -> Found:
        """Refuse adapters where weights are trained, and weights where adapters are."""
        if ("base" in found.state) == self._keeps_base:
            return found
        content = "weights without adapters"
        trained = "adapters"
        recipe = "adaptive_full_finetune"
        model = "without them"
        if "base" in found.state:
            content = "adapters"
            trained = "weights"
            recipe = "adaptive_lora_finetune"
            model = "with adapters"
        assert found.point is not None
        remedy = (
            f"{found.point.path} holds {content}, and {trained} are trained here; resume it with"
            f" `tune run {recipe}`, or, as adaptive_dpo and adaptive_distill train both, with a"
            f" model {model}; or give another output_dir"
        )
        raise SettingError("resume_from_checkpoint", self._cfg.resume_from_checkpoint, remedy)

    # --- one folder, one run

    def begin(self, run: str, *, overwrites: bool) -> str:
        """Record the run that torchrun has started, so that a restart resumes it; refuse a run that
        must not begin here.

        Args:
            run: name of the run that begins here, or resumes.
            overwrites: True where the saves of other runs may be replaced.

        Returns:
            What will be replaced, in words; empty for nothing.

        Raises:
            SettingError: the folder holds saves of another run; or this run would remove what it
                begins with; or the run that ``auto`` resumes is done.
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
        for key in ("checkpoint_dir", "adapter_checkpoint"):
            value = self._cfg.checkpointer.get(key)
            if value and any(map(Path(value).resolve().is_relative_to, folders)):
                remedy = (
                    "overwrite_output_dir=True would remove it, as an earlier run of"
                    f" {self.path} has saved it; give another output_dir"
                )
                raise SettingError(f"checkpointer.{key}", value, remedy)

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
    """Return runs and the names of their saves in words."""
    return ", ".join(
        f"{f'run {run}' if run else 'an unknown run'} ({', '.join(path.name for path in paths)})"
        for run, paths in saves_by_run.items()
    )


class RunStore(Weights):
    """Loads what a run begins with, and saves it.

    Rank zero looks for the checkpoint and sends what it found to the others; all read from a file
    system that they share. Any number of ranks may have saved what is loaded.

    Args:
        cfg: configuration of the run.
        settings: settings of the configuration, checked.
        keeps_base: True where checkpoints are of adapters, on a base that is read again; see
            :class:`.FullModel`.
        on_failure: function that is called with the error of a resume point that failed in the
            background.

    Attributes:
        found: what the run begins with.
        is_divided: True where each rank reads its own part of what trains.
        replaces: saves of other runs that go with the first save of this one, in words.

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
            # On other ranks this is None, and nothing there asks it.
            self._files = cast(ModelFiles, files)

    @property
    def resumes_here(self) -> bool:
        """Whether the run resumes from a resume point of its own folder."""
        point = self.found.point
        return point is not None and point.path.absolute().parent == self._folder.path.absolute()

    def resume(self, job: Job, data: Data, *, seed: int) -> ResumedRun:
        """Return the state of the run that begins or resumes here; see :class:`.ResumedRun`."""
        return ResumedRun(job, data, self.found, seed=seed)

    def saver(self, *parts: Any, same_within: float) -> Saver:
        """Return what saves the run here, of the arguments of :class:`Saver`."""
        return Saver(self, *parts, same_within=same_within)

    def begin(self, run: str) -> None:
        """Begin to save as a run; a restart by torchrun resumes this one.

        Under adapters, the files of the base are read, whose checksums every checkpoint has.

        Raises:
            CheckpointError: the base is not that on which a checkpoint was trained.
            SettingError: the folder holds saves of another run.
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
            # Of those of epochs, the newest is needed alone.
            keep_last = 1
        self._manager = CheckpointManager(
            self._folder.path,
            run=run,
            keep_last=keep_last,
            asynchronous=self._saving.enable_async_checkpointing,
            process_group=self._group,
        )

    def after_end(self) -> str:
        """Return what a run that ends now resumes from, as the end of a sentence; on rank zero."""
        # A resume point in the background may yet become complete; several ranks would have to
        # wait together, and only rank zero asks.
        with contextlib.suppress(CheckpointError):
            if distributed.world_size() == 1:
                self.wait()
        newest = self._folder.newest_of([self._run])
        if newest is None:
            return (
                "nothing of this run is saved yet, so there is nothing to resume from; start it"
                " again"
            )
        # Where several runs have saved, the checkpoint has to be named.
        value = newest if len(self._folder.saves_by_run()) > 1 else True
        return f"resume_from_checkpoint={value} resumes from {newest}"

    # --- loading

    def load_weights(self) -> Mapping[str, Any]:
        """Load the state dict of the base on rank zero.

        Its names are torchtune's. It is empty on other ranks, and where a resume point holds the
        whole model.
        """
        # torchtune's checkpointer learns from reading the base how to save: read it in any case.
        weights = distributed.on_rank_zero(lambda: self._files.load_weights())
        if weights is None or (self.is_divided and not self._keeps_base):
            return {}
        return weights

    def load_divided(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what each rank holds of a model from a resume point.

        Raises:
            CheckpointError: it cannot be read, or is of a model whose weights have other shapes.
        """
        assert self.found.point is not None
        try:
            self.found.point.load_into({"model": dict(state)}, process_group=self._group)
        except CheckpointError as error:
            if "model" not in self._saving.resume_allow_changes:
                raise
            remedy = "resume_allow_changes=[model] is for changes that keep the shape of weights"
            raise CheckpointError(f"{error}; {remedy}: resume with the checkpoint's") from error

    def load_optimizer(self, trainer: Trainer) -> None:
        """Load the optimizer's state, where training is resumed."""
        if self.found.point:
            state = self.found.point.load_optimizer(
                trainer.optimizers, trainer.names_of_parameters, process_group=self._group
            )
            load_named_optimizer_state(state, trainer.optimizers, trainer.names_of_parameters)

    # --- saving

    def check(self, trainer: Trainer, num_bytes: int) -> None:
        """Refuse to train what cannot be saved.

        Args:
            trainer: what is trained.
            num_bytes: bytes of the tensors of an export.

        Raises:
            SettingError: the disk has less free; or the optimizer's state cannot be saved.
        """

        def check_disk() -> None:
            folder = self._folder.exports_path.absolute()
            # A checkpointer of one's own may make it with its first file.
            nearest = next(path for path in (folder, *folder.parents) if path.exists())
            free = shutil.disk_usage(nearest).free
            if free < num_bytes:
                remedy = (
                    f"an epoch takes {format_bytes(num_bytes)}, and {format_bytes(free)} are free"
                    " there; free disk space, or give another folder"
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
        """Save a resume point; return the seconds for which training waited.

        Raises:
            CheckpointError: saving failed, unless it is written in the background; what was saved
                before is untouched.
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
            CheckpointError: saving failed; what was saved before is untouched.
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
                ends_run=ends_run,
            )

        distributed.on_rank_zero(export)
        self._remove_earlier_runs()

    def is_exported(self, epoch: int) -> bool:
        """Return whether this run has exported the weights of an epoch; a collective."""

        def is_there() -> bool:
            exports = exports_in(self._folder.exports_path)
            return any((export.epoch, export.run) == (epoch, self._run) for export in exports)

        return distributed.from_rank_zero(is_there)

    def wait(self) -> None:
        """Wait for a resume point that is being written; raise a CheckpointError if it failed."""
        if self._manager is not None:
            self._manager.wait()
            self._remove_earlier_runs()

    def close(self) -> None:
        """Wait, and save no more; raise a CheckpointError if the last one failed."""
        if self._manager is not None:
            self._manager.close()

    def _remove_earlier_runs(self) -> None:
        """Remove what this run replaces, once, after its first save is complete."""
        run = self._run
        if not self.replaces or run is None:
            return
        if distributed.from_rank_zero(lambda: self._folder.remove_others(run)):
            self.replaces = ""


class Saver:
    """Saves a run after its epochs, every so many steps, and where it is asked to end.

    Args:
        store: writer of the files.
        job: job of the run.
        resumed: state that the run began with.
        batches: steps and progress of the run.
        log: log of each save.
        same_within: as in :class:`.Preemption`.

    Attributes:
        preemption: request to end this process, which is noted within its context.
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
        """Save a resume point, unless training is done and that is not asked for, and export the
        weights; end here if the process is asked to end.

        Raises:
            CheckpointError: saving failed; what was saved before is untouched.
        """
        is_last = epoch + 1 >= self._epochs
        step = self._batches.progress.steps
        if distributed.any_of_ranks(not trainer.is_finite()):
            message = (
                f"weights are nan or infinite after epoch {epoch}: what is saved is of no use;"
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
                    log.warning("the last epoch is saved as weights alone: %s", error)
            self._export(trainer, epoch=epoch, step=step, ends_run=is_last)
        except CheckpointError as error:
            after_end = distributed.from_rank_zero(self._store.after_end)
            raise CheckpointError(f"{error}; {after_end}") from error
        if distributed.any_of_ranks(self.preemption.requested) and not is_last:
            # Once more, with the random numbers restored from it.
            self._save_point(trainer, prints=False, preempted=True)
            self._store.wait()
            self._end_early()

    def export_missing(self, trainer: Trainer) -> None:
        """Export the epoch that the resumed run has finished, where a kill has prevented it."""
        progress = self._resumed.progress
        epoch = progress.epoch - 1
        # An epoch that begins again has left the weights in its middle.
        in_mid_epoch = progress.epoch_steps > 0 or self._resumed.begins_epoch_again
        if in_mid_epoch or not self._store.resumes_here or self._store.is_exported(epoch):
            return
        ends_run = self._resumed.saved["epochs"] == progress.epoch
        self._export(trainer, epoch=epoch, step=progress.steps, ends_run=ends_run)

    def save_where_due(self, trainer: Trainer, *, ends: bool) -> None:
        """Save a resume point every so many steps, and where the process is asked to end.

        Args:
            trainer: what is saved.
            ends: whether all of several ranks know that one of them is asked to end.
        """
        every = self._saving.save_every_n_steps
        if distributed.world_size() == 1:
            ends = self.preemption.requested
        if not (ends or (every and self._batches.progress.steps % every == 0)):
            return
        try:
            self._save_point(trainer)
            if ends:
                self._store.wait()
        except CheckpointError as error:
            if ends:
                raise
            self._log.failed_save(error)
            return
        if ends:
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
        message = f"asked to end: saved at step {step}; {resumes}"
        self._log.event("preempted", message, step=step, exit_status=EXIT_STATUS)
        raise SystemExit(EXIT_STATUS)

    def _state(self) -> dict[str, Any]:
        """Return all that resuming needs besides weights and optimizer, as plain values and
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

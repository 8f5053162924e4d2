"""What a folder holds of runs, and where a run begins: the base, or the newest complete checkpoint
of a step or an epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adaptive_batch import distributed
from adaptive_batch._util import atomic_write
from adaptive_batch.checkpoint import (
    Checkpoint,
    SkippedCheckpoint,
    checkpoints_in,
    newest_complete,
    remove_folder,
)
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.report import read_records

from .checks import AUTO
from .epoch_checkpoints import (
    ADAPTERS,
    STATE_KEY,
    SavedEpoch,
    inspect_epoch,
    manifests_in,
    remove_epochs_of_others,
)


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

    @property
    def run(self) -> str | None:
        """The run that saved the checkpoint; None at the base, or where torchtune's recipe saved
        it.
        """
        return _run_of_state(self.recipe_state)


@dataclass(frozen=True)
class _Save:
    """A resume point or an epoch: its place among the saves of the folder, its folder, and whether
    its run was done with it.
    """

    order: int
    path: Path
    ends_run: bool = False


class RunFolder:
    """What the folder of a run holds of it and of earlier runs; each question looks again.

    Args:
        path: the folder.
        checkpointer: block of the configuration, with the folder of epochs.

    Attributes:
        path: as given.
    """

    def __init__(self, path: Path, checkpointer: DictConfig) -> None:
        self.path = path
        self._checkpointer = checkpointer
        self._epochs_path = Path(checkpointer.output_dir)

    def last_run(self) -> str | None:
        """Return which run was started last in the folder; None where that is not known."""
        last = None
        for record in self._records("start"):
            last = record["run"]
        return last

    def ended_runs(self) -> set[str]:
        """Return the runs that trained to their end, and were not resumed since, by the log."""
        ended = set()
        run = ""
        for record in self._records("start", "end", "nothing_to_train"):
            if record["kind"] == "start":
                run = record["run"]
                ended.discard(run)
            else:
                ended.add(run)
        return ended

    def _records(self, *kinds: str) -> Iterator[dict[str, Any]]:
        path = self.path / "adaptive_batch" / "run.jsonl"
        records = read_records(path) if path.exists() else []
        return (record for record in records if record["kind"] in kinds)

    def newest_of(self, run: str | None) -> Path | None:
        """Return where a run would resume from; None where that would be another run, or nothing,
        or where no run has begun. Nothing is read of what is large.
        """
        saved, _ = self.saved()
        newest = max(
            saved, key=lambda checkpoint: (checkpoint.order, checkpoint.step), default=None
        )
        if newest is None or run is None or _run_of(newest) != run:
            return None
        return newest.path

    def remove_others(self, run: str) -> bool:
        """Remove what other runs have saved, once something of this run is there; return whether
        it is.
        """
        if run not in self.saves_by_run():
            return False
        remove_epochs_of_others(self._epochs_path, run)
        points, _ = checkpoints_in(self.path)
        for point in points:
            if _run_of(point) != run:
                remove_folder(point.path)
        return True

    def saved(self) -> tuple[list[Checkpoint | SavedEpoch], list[SkippedCheckpoint]]:
        """Return the checkpoints to resume from, as far as sizes tell, and those to skip."""
        points, skipped = checkpoints_in(self.path)
        saved: list[Checkpoint | SavedEpoch] = [*points]
        epoch = inspect_epoch(self._checkpointer)
        if isinstance(epoch, SavedEpoch):
            saved.append(epoch)
        elif epoch is not None:
            skipped.append(epoch)
        return saved, skipped

    def saves_by_run(self) -> dict[str, list[_Save]]:
        """Return the saves of each run, oldest first; those whose run is not known are left out."""
        points, _ = checkpoints_in(self.path)
        owners = [(_run_of(point), _Save(point.order, point.path)) for point in points]
        for path, manifest in manifests_in(self._epochs_path):
            save = _Save(manifest.identity["order"], path, manifest.ends_run)
            owners.append((manifest.run, save))
        saves: dict[str, list[_Save]] = {}
        for run, save in sorted(owners, key=lambda owner: owner[1].order):
            if run is not None:
                saves.setdefault(run, []).append(save)
        return saves

    def unfinished(self) -> dict[str, list[_Save]]:
        """Return the saves of runs that have something to resume from here, and did not train to
        their end.
        """
        saved, _ = self.saved()
        resumable = {_run_of(checkpoint) for checkpoint in saved}
        unfinished = {
            run: saves
            for run, saves in self.saves_by_run().items()
            if run in resumable and not saves[-1].ends_run
        }
        # Of a run that has ended, a later one may have replaced the last epoch.
        ended = self.ended_runs() if unfinished else set()
        return {run: saves for run, saves in unfinished.items() if run not in ended}

    def epochs(self) -> list[Path]:
        """Return the folders of epochs."""
        return list(self._epochs_path.glob("epoch_*"))


class SavedRuns:
    """The resume points and epochs in the folder of a run, which earlier runs may have saved too.

    Each question looks at the folder again. For rank zero alone.

    Args:
        cfg: configuration of the run; ``resume_from_checkpoint`` is False, True, ``auto`` or the
            path of a checkpoint.
        keeps_base: True where checkpoints are of adapters, on a base that is read again.

    Attributes:
        folder: what is there of runs.
    """

    def __init__(self, cfg: DictConfig, *, keeps_base: bool) -> None:
        self._cfg = cfg
        self._keeps_base = keeps_base
        self.folder = folder = RunFolder(Path(cfg.output_dir), cfg.checkpointer)
        self._job = folder.path / "adaptive_batch" / "job.json"
        self._launch = distributed.launch_name()

    # --- where a run begins

    def find(self) -> Found:
        """Find what this run begins with.

        Raises:
            CheckpointError: the run resumes, and nothing complete is there, or saves of two runs.
            SettingError: the run resumes, and what is there is of another kind of fine-tuning; or
                the path that was given is no checkpoint.
        """
        restarted = self._find_of_job()
        if restarted is not None:
            return restarted
        asked = self._cfg.resume_from_checkpoint
        if isinstance(asked, str) and asked != AUTO:
            return self._same_kind(self._find_named(Path(asked)))
        saved, skipped = self.folder.saved()
        holds_earlier_run = bool(saved) or any(checkpoint.is_ours for checkpoint in skipped)
        if not asked or (asked == AUTO and not holds_earlier_run and not self.folder.epochs()):
            return Found("the base checkpoint", holds_earlier_run=holds_earlier_run)
        self._check_recipe_checkpoint()
        self._refuse_several_runs()
        return self._same_kind(self._newest(saved, skipped))

    def _find_of_job(self) -> Found | None:
        """Find what the run has saved that torchrun has restarted; None where that is nothing."""
        try:
            job = json.loads(self._job.read_text())
            # The file is of an earlier launch: this one was ended before it wrote its own.
            if job["launch"] != self._launch:
                return None
            saved, skipped = self.folder.saved()
            own = [checkpoint for checkpoint in saved if _run_of(checkpoint) == job["run"]]
            return self._same_kind(self._newest(own, skipped))
        except (OSError, ValueError, KeyError, CheckpointError):
            return None

    def _find_named(self, path: Path) -> Found:
        """Find the checkpoint of a path, which may lie in the folder of another run."""
        path = path.absolute()
        block = OmegaConf.merge(self._cfg.checkpointer, {"output_dir": str(path.parent)})
        assert isinstance(block, DictConfig)
        saved, skipped = RunFolder(path.parent, block).saved()
        named = [checkpoint for checkpoint in saved if checkpoint.path.absolute() == path]
        damaged = [checkpoint for checkpoint in skipped if checkpoint.path.absolute() == path]
        if not named and not damaged:
            remedy = (
                "it is no resume point, nor the last epoch with its recipe_state; give a folder"
                " such as OUTPUT_DIR/step_100"
            )
            if saved:
                there = ", ".join(str(checkpoint.path) for checkpoint in saved)
                remedy = f"{remedy}; there are {there}"
            raise SettingError("resume_from_checkpoint", self._cfg.resume_from_checkpoint, remedy)
        return self._newest(named, damaged)

    def _newest(
        self, saved: list[Checkpoint | SavedEpoch], skipped: list[SkippedCheckpoint]
    ) -> Found:
        newest, skipped = newest_complete(saved, skipped)
        passed_over = [checkpoint.describe() for checkpoint in skipped]
        if newest is None:
            raise CheckpointError(self._nothing_complete(passed_over))
        state = newest.load_small_state()
        # What is damaged may be all of the latest run: resuming an earlier one would go unnoticed.
        if any(checkpoint.is_ours for checkpoint in skipped):
            last_run = self.folder.last_run()
            if last_run is not None and last_run != _run_of_state(state):
                remedy = (
                    "restore what was saved, remove it to resume the earlier run, or begin again"
                    " (resume_from_checkpoint=False overwrite_output_dir=True)"
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

    def _same_kind(self, found: Found) -> Found:
        """Refuse adapters where weights are trained, and weights where adapters are."""
        holds_adapters = "base" in (found.recipe_state or {}).get(STATE_KEY, {})
        # torchtune's own recipes save no state of ours: the files of an epoch tell what it holds.
        if found.epoch:
            holds_adapters = (found.epoch.path / ADAPTERS).exists()
        if holds_adapters == self._keeps_base:
            return found
        if holds_adapters:
            content = "adapters"
            trained = "weights"
            recipe = "adaptive_lora_finetune"
            model = "with adapters"
        else:
            content = "weights without adapters"
            trained = "adapters"
            recipe = "adaptive_full_finetune"
            model = "without them"
        remedy = (
            f"{found.source} holds {content}, and {trained} are trained here; resume it with `tune"
            f" run {recipe}`, or, as adaptive_dpo and adaptive_distill train both, with a model"
            f" {model}; or give another output_dir"
        )
        raise SettingError("resume_from_checkpoint", self._cfg.resume_from_checkpoint, remedy)

    def _check_recipe_checkpoint(self) -> None:
        block = self._cfg.checkpointer
        recipe_checkpoint = block.get("recipe_checkpoint")
        if recipe_checkpoint and not Path(block.output_dir, recipe_checkpoint).exists():
            remedy = (
                f"there is no such file in {block.output_dir}; leave it out: resuming finds the"
                " recipe state itself"
            )
            raise SettingError("checkpointer.recipe_checkpoint", recipe_checkpoint, remedy)

    def _nothing_complete(self, passed_over: list[str]) -> str:
        """Return why there is nothing to resume from."""
        folder = self.folder.path
        if passed_over:
            remedy = (
                "restore what was saved, or begin again (resume_from_checkpoint=False"
                " overwrite_output_dir=True)"
            )
            return (
                f"{folder} holds nothing complete to resume from ({'; '.join(passed_over)});"
                f" {remedy}"
            )
        if self.folder.epochs():
            return (
                f"{folder} holds the weights of a run that is done, and nothing to resume from: the"
                " last epoch was saved without its recipe_state; train on from its weights with"
                " another output_dir and resume_from_checkpoint=False"
            )
        return (
            f"{folder} holds nothing to resume from: no resume point (step_N), and no recipe_state"
            " of an epoch; check output_dir, or set resume_from_checkpoint=False to begin, as for"
            f" a run that was ended before its first save; {AUTO} does either"
        )

    # --- whose saves there are

    def begin(self, run: str, *, overwrites: bool) -> None:
        """Refuse a run that must not begin here; write down which one torchrun has started, so that
        a restart resumes it.

        Args:
            run: name of the run that begins here, or resumes.
            overwrites: True where an earlier run in the folder may be replaced.

        Raises:
            SettingError: a new run would replace one that has not ended, or remove what it begins
                with; or the run that ``auto`` resumes is done.
        """
        saves = self.folder.saves_by_run()
        unfinished = self.folder.unfinished()
        if unfinished and run not in saves and not overwrites:
            choice = "True"
            if len(saves) > 1:
                newest = max(chain(*unfinished.values()), key=attrgetter("order"))
                choice = str(newest.path)
            remedy = (
                f"it holds what {_described(unfinished)} would resume from; resume it"
                f" (resume_from_checkpoint={choice}), give another folder, or replace it"
                " (overwrite_output_dir=True)"
            )
            raise SettingError("output_dir", str(self.folder.path), remedy)
        if overwrites:
            self._refuse_removing_base(run, saves)
        if run in saves and self._cfg.resume_from_checkpoint == AUTO:
            self._refuse_done(run, saves[run][-1])
        if self._launch is not None:
            atomic_write(self._job, json.dumps({"run": run, "launch": self._launch}))

    def _refuse_removing_base(self, run: str, saves_by_run: dict[str, list[_Save]]) -> None:
        for key in ("checkpoint_dir", "adapter_checkpoint"):
            value = self._cfg.checkpointer.get(key)
            for owner, saves in saves_by_run.items():
                folders = [save.path.resolve() for save in saves]
                if (
                    owner != run
                    and value
                    and any(map(Path(value).resolve().is_relative_to, folders))
                ):
                    remedy = (
                        "overwrite_output_dir=True would remove it, as an earlier run of"
                        f" {self.folder.path} has saved it; give another output_dir"
                    )
                    raise SettingError(f"checkpointer.{key}", value, remedy)

    def _refuse_done(self, run: str, last: _Save) -> None:
        if not last.ends_run:
            return
        epochs = int(last.path.name.removeprefix("epoch_")) + 1
        if epochs >= self._cfg.epochs:
            remedy = (
                f"run {run} is done: {last.path.name} was its last; raise epochs to train on, or"
                " give another output_dir to begin a new run"
            )
            raise SettingError("resume_from_checkpoint", AUTO, remedy)

    def _refuse_several_runs(self) -> None:
        saves = self.folder.saves_by_run()
        if len(saves) < 2:
            return
        saved, _ = self.folder.saved()
        newest = max(saved, key=lambda checkpoint: checkpoint.order, default=None)
        example = "OUTPUT_DIR/step_100" if newest is None else newest.path
        raise CheckpointError(
            f"{self.folder.path} holds saves of {len(saves)} runs: {_described(saves)}; name the"
            f" checkpoint to resume from, as in resume_from_checkpoint={example}"
        )


def _run_of(saved: Checkpoint | SavedEpoch) -> str | None:
    """Return which run made a save; None where torchtune's recipe did, or it cannot be read."""
    try:
        return _run_of_state(saved.load_small_state())
    except CheckpointError:
        return None


def _run_of_state(recipe_state: dict[str, Any] | None) -> str | None:
    run: str | None = (recipe_state or {}).get(STATE_KEY, {}).get("run")
    return run


def _described(saves_by_run: dict[str, list[_Save]]) -> str:
    """Return runs and the names of their saves in words."""
    return ", ".join(
        f"run {run} ({', '.join(save.path.name for save in saves)})"
        for run, saves in saves_by_run.items()
    )

"""State of a resumed run: the checkpoint, checked against the configuration, and ``lost.json`` of
an attempt that ended on all ranks.

:mod:`.settings` has the policy of each key.
"""

from __future__ import annotations

import json
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchtune import training

from adaptive_batch import distributed
from adaptive_batch._util import atomic_write, count, described_with_files, fingerprint
from adaptive_batch.checkpoint import Checkpoint
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState
from adaptive_batch.schedules import Progress, write_rate

from .checks import without_effect
from .configuration import as_dict, component_of, load_function, values_of
from .data import Data
from .job import Job
from .settings import FILLS_STEPS, RESUME

# Keys of a :class:`LostRun`: the rows of a trial of training and of the reference.
TRIALS = ("trial_rows", "trial_rows_reference")
# Conditions that no permission changes: the optimizer's state belongs to them.
_FIXED = ("optimizer._component_", "optimizer_in_bwd")
# Arguments of an optimizer that only select an implementation.
_IMPLEMENTATION = ("optimizer.fused", "optimizer.foreach", "optimizer.capturable")
_LR = "optimizer.lr"
_MAX_STEPS = "max_steps_per_epoch"
# Conditions whose value in the checkpoint is kept unless `resume_allow_changes` lists them.
_CHANGEABLE = (_LR, "optimizer.weight_decay", _MAX_STEPS)
# Rows that the fingerprint of a dataset is made of.
_SAMPLED_ROWS = 64

# Kind, message and facts of an event.
Change = tuple[str, str, dict[str, Any]]


@dataclass(frozen=True)
class FoundCheckpoint:
    """Checkpoint that a run starts from.

    Attributes:
        checkpoint: checkpoint to resume; None to start from the base model.
        state: small state of the checkpoint; empty for the base model.
        passed_over: one line per skipped newer checkpoint.
    """

    checkpoint: Checkpoint | None = None
    state: dict[str, Any] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()


class ResumedRun:
    """State of a new or resumed run, checked against the configuration.

    The constructor changes `job`: it counts batches on the original number of ranks, and its
    optimizer has the settings of the checkpoint.

    Args:
        job: job of the run.
        data: rows of the run.
        found: checkpoint that the run starts from.
        seed: seed of a new run.

    Attributes:
        found: checkpoint that the run starts from.
        saved: state of each part by name; empty for a new run.
        progress: progress at the start.
        name: name of the run.
        conditions: settings and data that determine the results, as plain values. Those of the
            checkpoint that are kept override the configuration.
        batching: settings of the steps; those of the checkpoint that are kept override the
            configuration.
        changes: events: differences from the checkpoint, and keys without effect.
        restarts_epoch: whether the epoch restarts because its remaining rows are unknown.
        keeps_batch: whether the run keeps the batch size of the checkpoint: always with a schedule;
            also if the size was found or grown, unless this run searches for it for the first time.
        takes_found_batch: whether the run begins with the batch size that a search finds.

    Raises:
        SettingError: the configuration belongs to another run.
    """

    def __init__(self, job: Job, data: Data, found: FoundCheckpoint, *, seed: int) -> None:
        self._job = job
        self._settings = job.settings
        self.found = found
        self.saved = found.state
        # `batch_size` is for each rank, so a step keeps its rows only if ranks are counted as at
        # the start of the run.
        if self.saved:
            job.ranks = self.saved["steps"]["ranks"]
        check_fewer_ranks(job)
        self.conditions = run_conditions(job, data, seed=seed)
        self.progress = Progress()
        self.name = distributed.from_rank_zero(lambda: uuid.uuid4().hex[:12])
        self.changes: list[Change] = []
        # Keys of the conditions in which this run differs from the checkpoint.
        self._changed: list[str] = []
        # Values that `resume_allow_changes` permits, of conditions that are kept otherwise.
        self._overrides: dict[str, Any] = {}
        self.restarts_epoch = self.keeps_batch = False
        if self.saved:
            self._resume(self.saved)
        # torchtune's sampler always has the seed 0.
        order_seed = 0 if job.settings.sample_order == "dataloader" else self.conditions["seed"]
        self.batching = replace(self._settings, seed=order_seed)
        self.takes_found_batch = (
            job.settings.use_maximum_batch_size
            and job.settings.batch_size_schedule is None
            and not self.keeps_batch
        )
        for key, message in without_effect(job.settings, job.cfg).items():
            self.changes.append(("no_effect", message, {"key": key}))

    def _resume(self, saved: Mapping[str, Any]) -> None:
        """Restore the run of a checkpoint.

        Raises:
            SettingError: a condition differs that must not.
        """
        settings = self._settings
        saved_conditions = saved["conditions"]
        self.name = saved["run"]
        self.progress = Progress(**saved["progress"])
        if settings.reference_batch_size is None:
            self.conditions["reference_batch_size"] = saved_conditions["reference_batch_size"]
        if settings.batch_size_schedule is not None:
            self.keeps_batch = True
        elif settings.batch_changes:
            is_first_search = (
                settings.use_maximum_batch_size and not saved_conditions["use_maximum_batch_size"]
            )
            # Batches grow up to the bound of a search. A checkpoint without a bound was saved
            # before any search, so its batch size was neither found nor grown.
            knows_bound = saved["limits"]["bound"] is not None or settings.grow_beyond_maximum
            self.keeps_batch = knows_bound and not is_first_search
        self._compare(saved_conditions)
        # The checkpoint may keep both.
        self._settings = replace(
            settings,
            batch_size=self.conditions["batch_size"],
            max_steps_per_epoch=self.conditions[_MAX_STEPS],
        )
        done = self.progress.epoch_steps
        # None for whole epochs.
        max_steps = self.conditions[_MAX_STEPS]
        if _MAX_STEPS in self._overrides and max_steps and max_steps < done:
            remedy = f"the checkpoint has done {done} steps of the epoch; give {done} or more"
            raise SettingError(_MAX_STEPS, max_steps, remedy)
        ranks = distributed.data_parallel_size()
        if ranks != self._job.ranks:
            message = (
                f"batch_size still refers to {count(self._job.ranks, 'rank')}, and the rows of a"
                " step are distributed over the current ranks"
            )
            self._add_changed("ranks", self._job.ranks, ranks, message)
        if self.restarts_epoch:
            self.progress = self.progress.at_epoch_start()

    def _compare(self, saved: Mapping[str, Any]) -> None:
        """Compare the conditions of this run with those of the checkpoint, and restore those that
        the checkpoint keeps.

        Raises:
            SettingError: a condition differs that must not, or `resume_allow_changes` has an
                unknown name.
        """
        now = self.conditions
        allowed = self._settings.resume_allow_changes
        refused = {name for name, policy in RESUME.items() if policy == "refuse"}
        # Keys that decide which rows an epoch or a step has.
        row_keys = {"dataset", *(name for name, policy in RESUME.items() if policy == "epoch")}
        choices = sorted(refused | row_keys | set(FILLS_STEPS) | set(_CHANGEABLE))
        for name in allowed:
            if name not in choices:
                remedy = f"{name} is not one of {', '.join(choices)}"
                raise SettingError("resume_allow_changes", list(allowed), remedy)
        if now["batch_tokens"]:
            row_keys |= set(FILLS_STEPS)
        in_mid_epoch = self.progress.epoch_steps > 0
        # The remaining rows of an epoch are known only if the epoch has the same rows as before.
        if in_mid_epoch:
            refused |= row_keys
        for name in {**now, **saved}:
            # True if the checkpoint's value overrides the configured one. The learning rate was
            # scheduled for the batch size with which training began.
            is_kept = (
                (name.startswith("optimizer.") and name not in _IMPLEMENTATION)
                or name in ("seed", _MAX_STEPS)
                or (name == "batch_size" and self.keeps_batch)
            )
            # An earlier version of this package may not have saved all conditions. Compare only
            # saved ones, and those that are kept, whose missing value means the default.
            is_compared = name in saved or is_kept
            if not is_compared or saved.get(name) == now.get(name):
                continue
            before = saved.get(name)
            after = now.get(name)
            if name in _FIXED:
                remedy = f"the checkpoint's optimizer state was saved with {before}; give that"
                raise SettingError(name, after, remedy)
            if not is_kept:
                # The file of a function is `batch_increase_function.file`.
                key, _, _ = name.partition(".")
                if key in refused and key not in allowed:
                    remedy = (
                        f"the checkpoint was trained with {before!r}; resume with that, or set"
                        f" resume_allow_changes=[{key}]"
                    )
                    raise SettingError(key, after, remedy)
                self._add_changed(name, before, after, "differs from the checkpoint")
                self._changed.append(key)
            elif name in allowed and (after is not None or name == _MAX_STEPS):
                # Use the configured value, which the user allowed. A removed key has none, but
                # max_steps_per_epoch=null means whole epochs.
                self._add_changed(name, before, after, "differs from the checkpoint")
                self._overrides[name] = after
            else:
                # Use the value of the checkpoint. Report the batch size of its last step, which a
                # search or a rule may have changed, instead of its configured one.
                kept = before
                if name == "batch_size" and self._settings.batch_changes:
                    kept = self.saved["steps"][name]
                self._add_kept(name, after, kept)
                now[name] = before
        self.restarts_epoch = in_mid_epoch and not row_keys.isdisjoint(self._changed)
        self._configure_optimizer()

    def _configure_optimizer(self) -> None:
        """Replace the block of the optimizer by the conditions, which the checkpoint may keep."""
        # Build the configured optimizer once before: a wrong name is refused even if its value
        # would have no effect.
        self._job.optimizer_of_one_weight()
        block = {}
        for name, value in self.conditions.items():
            first, _, key = name.partition(".")
            if first == "optimizer" and value is not None:
                block[key] = value
        self._job.cfg.optimizer = block

    def _add_kept(self, name: str, configured: Any, kept: Any) -> None:
        """Add the event of a configured value that has no effect."""
        text = "default" if kept is None else kept
        message = f"{name}={configured} has no effect: the checkpoint's {text} is kept"
        if name in _CHANGEABLE:
            message += f"; resume_allow_changes=[{name}] changes it"
        self.changes.append(
            ("no_effect", message, {"key": name, "configured": configured, "after": kept})
        )

    def _add_changed(self, name: str, before: Any, after: Any, reason: str) -> None:
        """Add the event of a value that differs from the checkpoint."""
        message = f"{name} {before} -> {after}: {reason}"
        self.changes.append((name, message, {"before": before, "after": after}))

    @property
    def keeps_steps(self) -> bool:
        """True if this run continues the checkpoint's plan of steps: no setting that affects it has
        changed.
        """
        return bool(self.saved) and not self._changed and _MAX_STEPS not in self._overrides

    def change_optimizer(self, optimizers: Iterable[Optimizer]) -> None:
        """Apply the changes that `resume_allow_changes` permits, after the optimizers loaded
        their state.
        """
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for name, value in self._overrides.items():
                    block, _, key = name.partition(".")
                    if name == _LR:
                        write_rate(group, float(value))
                        # Schedulers prefer the saved initial rate, and would ignore the new one.
                        group.pop("initial_lr", None)
                    elif block == "optimizer":
                        group[key] = value

    def state_of(self, name: str) -> dict[str, Any] | None:
        """Return the saved state of a part; None if it has none."""
        counts_epoch = name in ("full_batch_loss", "nonfinite")
        if name not in self.saved or (counts_epoch and self.restarts_epoch):
            return None
        state: dict[str, Any] = dict(self.saved[name])
        if name == "steps" and "lengths" in state:
            # The lengths of the current epoch, and those of an epoch with the constant batch. They
            # are saved once if they are equal.
            epoch_lengths = state["lengths"] or state["reference_lengths"]
            # An epoch that begins now counts its lengths itself.
            state["lengths"] = epoch_lengths if self.progress.epoch_steps else None
            # With other rows or keys, the lengths of later epochs have to be counted again.
            if self._changed:
                state["reference_lengths"] = None
        return state

    def begin_reading(self, loader: DataLoader[Any], progress: Progress) -> Iterator[Any]:
        """Start to read the rows of the first epoch with the random state of the checkpoint.

        ``iter(loader)`` draws a random number. A checkpoint between two epochs was saved before
        that draw, a checkpoint within an epoch after it.
        """
        if not progress.epoch_steps:
            self._restore_random_state(progress)
        batches = iter(loader)
        if progress.epoch_steps:
            self._restore_random_state(progress)
        return batches

    def _restore_random_state(self, progress: Progress) -> None:
        """Restore the random state of the checkpoint: building the model and searching have drawn
        random numbers since.
        """
        # torchtune's recipe, which resumes only after whole epochs, does not restore it. Without
        # our keys, do the same to have the same results.
        restores = (
            self._settings.adaptive
            or self._settings.save_every_n_steps is not None
            or self.saved.get("preempted")
            or progress.epoch_steps
        )
        if not self.saved or not restores:
            return
        states: list[dict[str, torch.Tensor]] = self.saved["random_states"]
        if len(states) == distributed.world_size():
            RandomState(self._job.device).load_state_dict(states[distributed.rank()])
        else:
            # With another number of ranks, no state belongs to this rank. Seed by the step, so that
            # the random numbers of earlier steps do not repeat.
            training.set_seed(seed=self.conditions["seed"] + progress.steps)


def check_fewer_ranks(job: Job) -> None:
    """Raise if this run has fewer ranks than the checkpoint and cannot split their rows."""
    ranks = distributed.data_parallel_size()
    if job.settings.optimizer_in_bwd and ranks < job.ranks:
        raise SettingError(
            "optimizer_in_bwd",
            True,
            f"the checkpoint's steps were distributed over {job.ranks} ranks, and"
            f" {count(ranks, 'rank')} cannot split their rows; start {job.ranks} or more ranks, or"
            " start again with optimizer_in_bwd=False",
        )


def run_conditions(job: Job, data: Data, *, seed: int) -> dict[str, Any]:
    """Return the settings and data that determine the results of a run, as plain values."""
    config = as_dict(job.cfg)
    settings = job.settings
    # Our keys with their defaults; torchtune's keys are only in the configuration.
    values = values_of(settings)
    conditions: dict[str, Any] = {}
    for name, policy in RESUME.items():
        if policy != "free":
            # A refused key is compared as the user wrote it, since its value may be an object.
            as_written = policy == "refuse" or name not in values
            conditions[name] = config.get(name) if as_written else values[name]
    conditions |= {f"optimizer.{key}": value for key, value in config["optimizer"].items()}
    for name in ("batch_increase_function", "batch_size_schedule"):
        path = component_of(config.get(name))
        # Other releases of this package change no result of its rules.
        if path is not None and not path.startswith("adaptive_batch."):
            conditions[f"{name}.file"] = described_rule(path, key=name)
    if settings.validates:
        conditions["batch_size_val"] = settings.validation_batch_size
    return conditions | {
        "lr_clock": settings.lr_clock,
        "reference_batch_size": str(
            settings.reference_batch_size or settings.global_batch(job.ranks)
        ),
        "dataset": _fingerprint_rows(job, data),
        "seed": seed,
    }


def described_rule(path: str, *, key: str) -> str:
    """Return the dotted path of a rule, and a fingerprint of the files of its module and of the
    module that defines its function or class.
    """
    rule = load_function(path, key=key)
    while isinstance(rule, partial):
        rule = rule.func
    named = [path]
    defined_in = getattr(rule, "__module__", None) or ""
    # The module may have a rule of this package, whose files count as unchanged.
    if not defined_in.startswith("adaptive_batch."):
        named.append(f"{defined_in}.{key}")
    return f"{path}, {fingerprint(described_with_files(named))[:16]}"


def _fingerprint_rows(job: Job, data: Data) -> str:
    """Return the number of rows of the dataset and a fingerprint of a sample, independent of file
    paths.
    """
    rows = len(data.dataset)
    num_sampled = min(rows, _SAMPLED_ROWS)
    # Evenly spaced, with the first and the last row.
    numbers = [
        round(number * (rows - 1) / max(1, num_sampled - 1)) for number in range(num_sampled)
    ]
    with RandomState(job.device):
        # Reading a row may augment it at random, so seed each library that may be used for it.
        torch.manual_seed(0)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        # Tokens, labels and masks of each sequence as lists; None for those that a row has not.
        sampled = [
            [
                None if values is None else list(map(int, values))
                for sequence in job.task.sequences(data.dataset[number])
                for values in sequence
            ]
            for number in numbers
        ]
    return f"{count(rows, 'row')}, {fingerprint('rows', rows, numbers, sampled)[:16]}"


class LostRun:
    """Record of an attempt that ended on all ranks: a limit that was too large, or a trial that did
    not finish. The next attempt with `resume_from_checkpoint` begins below them.

    The constructor is a collective. Without `resume_from_checkpoint`, it ignores the record, which
    :meth:`begin` deletes.

    Args:
        job: job of the run.
        trials_name: fingerprint of the settings of trials; recorded trials with another one are
            ignored.
    """

    def __init__(self, job: Job, *, trials_name: str) -> None:
        self._job = job
        self._path = Path(job.cfg.output_dir) / "adaptive_batch" / "lost.json"
        self._trials_name = trials_name
        self._facts: dict[str, Any] = distributed.from_rank_zero(self._read)

    def begin(self) -> None:
        """Delete the record of an earlier run unless it is resumed. Call it once the run is not
        refused any more.
        """
        if not self._job.cfg.resume_from_checkpoint and distributed.is_rank_zero():
            self._path.unlink(missing_ok=True)

    def trial_rows(self, key: str) -> int | None:
        """Return how many rows the trial of a key of :data:`TRIALS` had when it ended the run; None
        if no such trial did.
        """
        rows: int | None = self._facts.get(key)
        return rows

    def describe_trials(self) -> list[str]:
        """Describe each trial that ended the run, and how to try its rows again."""
        return [
            f"{key}={self._facts[key]}: this trial ended all ranks, so whether they fit is not"
            f" known; up to half are tried; delete {self._path} to try more"
            for key in TRIALS
            if key in self._facts
        ]

    def limit(self, conditions: Mapping[str, Any]) -> MicroBatchLimit | None:
        """Return the limit that ran out of memory under the same conditions, reduced; None
        without one.
        """
        if self._facts.get("conditions") != dict(conditions):
            return None
        return MicroBatchLimit(self._facts["limit"], self._facts["unit"])

    def write_down(
        self,
        kind: str,
        message: str,
        facts: Mapping[str, Any],
        *,
        conditions: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Log the end of all ranks, and record facts for a restart.

        Args:
            kind, message, facts: reason of the end.
            conditions: function that returns the conditions that a training limit was set under.
        """
        record = {"kind": "ended", "time": round(time.time(), 3), "message": message}
        record |= {"rank": distributed.rank(), "reason": kind, **facts}
        # Append to the file of the run log: rank 0, which has it open, may hang in a collective.
        with self._path.with_name("run.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        # Of all facts, a restart needs the trial or the limit that failed.
        new_facts = {key: facts[key] for key in TRIALS if key in facts}
        if new_facts:
            new_facts["trial_settings"] = self._trials_name
        if "limit" in facts and self._job.settings.on_out_of_memory == "shrink":
            new_facts |= {"limit": facts["limit"], "unit": facts["unit"]}
            new_facts["conditions"] = dict(conditions())
        # Facts of earlier attempts stay.
        if new_facts:
            self._facts |= new_facts
            atomic_write(self._path, json.dumps(self._facts), sync=True)

    def _read(self) -> dict[str, Any]:
        """Return the recorded facts of the run that is resumed."""
        if not self._job.cfg.resume_from_checkpoint or not self._path.exists():
            return {}
        facts: dict[str, Any] = json.loads(self._path.read_text())
        # A trial with other settings may fit.
        if facts.get("trial_settings") != self._trials_name:
            facts = {key: value for key, value in facts.items() if not key.startswith("trial_")}
        return facts

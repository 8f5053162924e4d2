"""State of a resumed run: the checkpoint, checked against the configuration, and ``lost.json`` of
an attempt that ended on all ranks.

:mod:`.settings` has the policy of each key.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchtune import training

from adaptive_batch import distributed
from adaptive_batch._util import atomic_write, count, fingerprint
from adaptive_batch.checkpoint import Checkpoint
from adaptive_batch.data import Batches, MicroBatchLimit
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState
from adaptive_batch.schedules import Progress, ReferenceBatch, write_rate
from adaptive_batch.training import MicroBatchSizer

from .config_errors import as_dict
from .data import Data
from .job import Job
from .keys import load_function, values_of
from .probe_cache import settings_name
from .rate import check_rate
from .settings import FILLS_STEPS, RESUME

# Kinds of trials that ended all ranks, in words.
TRIALS = {
    "trial_rows": "",
    "trial_rows_val": "of validation ",
    "trial_rows_reference": "of the reference ",
}
# Settings that the optimizer's state in the checkpoint brings with it.
_KEPT = "optimizer_settings"
# Arguments of an optimizer that resuming ignores: the first two are reported separately, the others
# only select an implementation.
_IGNORED = ("_component_", "lr", "fused", "foreach", "capturable")
# Keys whose value in the checkpoint is kept unless `resume_allow_changes` names them.
_LR = "optimizer.lr"
_WEIGHT_DECAY = "optimizer.weight_decay"
_MAX_STEPS = "max_steps_per_epoch"
_CHANGEABLE = (_LR, _WEIGHT_DECAY, _MAX_STEPS)
_SAMPLED_ROWS = 64


@dataclass(frozen=True)
class Found:
    """Checkpoint that a run starts from.

    Attributes:
        point: checkpoint to resume; None to start from the base model.
        state: small state of the checkpoint; empty for the base model.
        passed_over: one line per skipped newer checkpoint.
    """

    point: Checkpoint | None = None
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
        lost: record of an earlier attempt that ended on all ranks; None in a preview.
        saved: state of each part by name; empty for a new run.
        progress: progress at the start.
        name, seed, max_steps_per_epoch: values of the run, which override the configuration.
        begins_epoch_again: whether the epoch restarts because its remaining rows are unknown.
        keeps_batch: whether the run keeps the batch size of the checkpoint: always with a schedule;
            also if the size was found or grown, unless this run searches for it for the first time.

    Raises:
        SettingError: the configuration belongs to another run.
    """

    def __init__(self, job: Job, data: Data, found: Found, *, seed: int) -> None:
        self._job = job
        self._settings = job.settings
        self.found = found
        self.saved = found.state
        # Batches are counted on the original number of ranks.
        if self.saved:
            job.count_batches_on(self.saved["steps"]["ranks"])
        check_fewer_ranks(job)
        kind_of_optimizer = {
            "optimizer._component_": str(job.cfg.optimizer._component_),
            "optimizer_in_bwd": job.settings.optimizer_in_bwd,
        }
        self._now = {"conditions": run_conditions(job, data), "optimizer": kind_of_optimizer}
        self.progress = Progress()
        self.name = distributed.from_rank_zero(lambda: uuid.uuid4().hex[:12])
        self.seed = seed
        self.max_steps_per_epoch = self._settings.max_steps_per_epoch
        self._differs: list[str] = []
        self._ignored: dict[str, tuple[Any, Any]] = {}
        self._changed: dict[str, tuple[Any, Any]] = {}
        self.begins_epoch_again = self.keeps_batch = False
        if self.saved:
            self._resume(self.saved)
            self._differs, self.begins_epoch_again = compare(
                self.saved["conditions"],
                self._now["conditions"],
                allowed=job.settings.saving.resume_allow_changes,
                in_mid_epoch=self.progress.epoch_steps > 0,
            )
        if self.begins_epoch_again:
            self.progress = self.progress.at_epoch_start()
        self.lost = None
        if not job.settings.preview:
            self.lost = LostRun(
                job,
                name=self.name,
                resumes=bool(self.saved),
                trials_name=settings_name(job, data),
            )

    def batches(
        self, data: Data, sizer: MicroBatchSizer, *, event: Callable[..., object]
    ) -> Batches:
        """Create the batches of the run, positioned at its progress.

        Raises:
            SettingError: see :func:`.check_rate`.
        """
        settings = self._settings
        batches = Batches(
            data.dataset,
            self._job.batching(seed=self.seed, max_steps_per_epoch=self.max_steps_per_epoch),
            sizer,
            counts_tokens=settings.rate.lr_clock.counts_tokens,
            event=event,
        )
        batches.resume(self.progress, self.state_of("steps"), keeps_batch=self.keeps_batch)
        check_rate(self._job, batches)
        return batches

    def _kept(self, name: str, configured: Any, saved: Any) -> Any:
        """Return the saved value of a key, or the configured value if `resume_allow_changes`
        lists the key.
        """
        if configured == saved:
            return saved
        if self._may_change(name):
            self._changed[name] = saved, configured
            return configured
        self._ignored[name] = configured, saved
        return saved

    def _resume(self, saved: Mapping[str, Any]) -> None:
        """Restore the run of a checkpoint."""
        settings = self._settings
        self.seed = self._kept("seed", self.seed, saved["seed"])
        self.max_steps_per_epoch = self._kept(
            _MAX_STEPS, self.max_steps_per_epoch, saved["max_steps_per_epoch"]
        )
        for key, value in self._now["optimizer"].items():
            saved_value = saved["optimizer"][key]
            if saved_value != value:
                remedy = (
                    f"the checkpoint's optimizer state was saved with {saved_value}; resume with"
                    " that value"
                )
                raise SettingError(key, value, remedy)
        self.name = saved["run"]
        self.progress = Progress(**saved["progress"])
        self._check_max_steps()
        lr = self._job.cfg.optimizer.get("lr")
        if self._may_change(_LR) and lr is not None and lr != saved["base_rate"]:
            self._changed[_LR] = saved["base_rate"], lr
        conditions = saved["conditions"]
        self._keep_optimizer_settings(conditions, self._now["conditions"])
        if settings.rate.reference_batch_size is None:
            self._now["conditions"]["reference_batch_size"] = conditions["reference_batch_size"]
        scheduled = settings.batch_size_schedule is not None
        if scheduled or settings.batch_changes:
            found_before = (
                conditions["use_maximum_batch_size"] or not settings.use_maximum_batch_size
            )
            knows_bound = saved["limits"]["bound"] is not None or settings.grow_beyond_maximum
            self.keeps_batch = scheduled or (found_before and knows_bound)

    @property
    def keeps_steps(self) -> bool:
        """True if the run has the steps planned at the time of the checkpoint."""
        planned_with = self.saved.get("epochs"), self.saved.get("configured_batch_size")
        settings = self._settings
        return not self._differs and planned_with == (settings.epochs, settings.batch_size)

    def _may_change(self, name: str) -> bool:
        return name in self._settings.saving.resume_allow_changes

    def _check_max_steps(self) -> None:
        """Raise if the epoch would end before the checkpoint."""
        done = self.progress.epoch_steps
        if _MAX_STEPS in self._changed and (self.max_steps_per_epoch or done) < done:
            remedy = f"the checkpoint has done {done} steps of the epoch; give {done} or more"
            raise SettingError(_MAX_STEPS, self.max_steps_per_epoch, remedy)

    def change_optimizer(self, optimizers: Iterable[Optimizer]) -> None:
        """Apply the changes that `resume_allow_changes` permits, after the optimizers loaded
        their state.
        """
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if _LR in self._changed:
                    _, rate = self._changed[_LR]
                    write_rate(group, float(rate))
                    # Schedulers start from this value.
                    if "initial_lr" in group:
                        group["initial_lr"] = float(rate)
                if _WEIGHT_DECAY in self._changed:
                    _, group["weight_decay"] = self._changed[_WEIGHT_DECAY]

    def _keep_optimizer_settings(self, saved: Mapping[str, Any], now: dict[str, Any]) -> None:
        cfg = self._job.cfg
        kept = dict(saved[_KEPT])
        decay = now[_KEPT].get("weight_decay")
        if self._may_change(_WEIGHT_DECAY) and decay is not None:
            if decay != kept.get("weight_decay"):
                self._changed[_WEIGHT_DECAY] = kept.get("weight_decay"), decay
            kept["weight_decay"] = decay
        if kept != now[_KEPT]:
            # Settings without effect must still have valid names.
            self._job.check_optimizer()
            configured = _differing_part(_KEPT, now, saved)
            defaults = _defaults_of(str(cfg.optimizer._component_), configured)
            self._ignored["optimizer"] = (configured, defaults | _differing_part(_KEPT, saved, now))
            own = {key: value for key, value in cfg.optimizer.items() if key in _IGNORED}
            cfg.optimizer = {**kept, **own}
            now[_KEPT] = kept

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the run and the conditions of its results, as plain values."""
        return {
            "run": self.name,
            "seed": self.seed,
            "max_steps_per_epoch": self.max_steps_per_epoch,
            **self._now,
        }

    def state_of(self, name: str) -> dict[str, Any] | None:
        """Return the saved state of a part; None if it has none."""
        if not self.saved or (
            name in ("full_batch_loss", "nonfinite", "epoch") and self.begins_epoch_again
        ):
            return None
        # The saved run may have run its reference model within the training micro-batches.
        if name == "reference_limits" and name not in self.saved:
            return None
        state: dict[str, Any] = dict(self.saved[name])
        if name == "steps" and "lengths" in state:
            # Equal lengths of the epoch and of the constant epoch are saved once.
            of_epoch = state["lengths"] or state["reference_lengths"]
            # A new epoch counts its lengths itself.
            state["lengths"] = of_epoch if self.progress.epoch_steps else None
            if self._differs:
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
        """Restore the random state of the checkpoint, after building and searching drew numbers."""
        restores = (
            self._settings.restores_random_state
            or self.saved.get("preempted")
            or progress.epoch_steps
        )
        if not self.saved or not restores:
            return
        states: list[dict[str, torch.Tensor]] = self.saved["random_states"]
        if len(states) == distributed.world_size():
            RandomState(self._job.device).load_state_dict(states[distributed.rank()])
        else:
            # Ranks cannot use each other's state.
            training.set_seed(seed=self.seed + progress.steps)

    def changes_of_steps(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield kind, message and facts of changes in epochs, ranks and batch size since the
        checkpoint.
        """
        settings = self._settings
        epochs = self.saved.get("epochs", settings.epochs)
        if epochs != settings.epochs:
            message = (
                f"epochs {epochs} -> {settings.epochs}: the learning rate's schedule spans the new"
                " number"
            )
            yield "epochs", message, {"before": epochs, "after": settings.epochs}
        configured = settings.batch_size
        ranks = distributed.data_parallel_size()
        began_on = self._job.ranks
        current = configured
        if self.saved:
            current = self.saved["steps"]["batch_size"]
        per_row = settings.gradient_accumulation_steps * began_on
        if ranks != began_on:
            rows = per_row * (current if self.keeps_batch else configured)
            share = (
                f"each holds {rows // ranks} to {-(-rows // ranks)} of the {rows} rows of a step"
            )
            if settings.batch_tokens:
                share = "the rows of each step are distributed by their tokens"
            message = (
                f"ranks {began_on} -> {ranks}: batch_size still refers to"
                f" {count(began_on, 'rank')}, and rows keep their order; {share}"
            )
            yield "ranks", message, {"before": began_on, "after": ranks}
        # A schedule decides the batch size.
        if configured == current or settings.batch_size_schedule is not None:
            return
        if self.keeps_batch:
            message = f"batch_size {current}: configured is {configured}, the checkpoint's is kept"
            yield "batch_size", message, {"before": current, "after": current}
        elif not settings.use_maximum_batch_size:
            message = (
                f"batch_size {current} -> {configured}: the global batch"
                f" {current * per_row} -> {count(configured * per_row, 'row')}"
            )
            yield "batch_size", message, {"before": current, "after": configured}

    def changes(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield kind, message and facts of settings that differ from the checkpoint, or that have
        no effect because the checkpoint's value is kept.
        """
        now = self._now["conditions"]
        saved = self.saved.get("conditions", {})
        for name in self._differs:
            saved_value = _differing_part(name, saved, now)
            value_now = _differing_part(name, now, saved)
            message = f"{name} {saved_value} -> {value_now}: differs from the checkpoint"
            yield name, message, {"before": saved[name], "after": now[name]}
        for name, (saved_value, value_now) in self._changed.items():
            message = f"{name} {saved_value} -> {value_now}: differs from the checkpoint"
            yield name, message, {"before": saved_value, "after": value_now}
        for name, (value, kept) in self._ignored.items():
            message = f"{name}={value} has no effect: the checkpoint's {kept} is kept"
            yield "no_effect", message, {"key": name, "configured": value, "after": kept}


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


def _defaults_of(component: str, keys: Iterable[str]) -> dict[str, Any]:
    """Return the default values of an optimizer's arguments."""
    parameters = inspect.signature(load_function(component, key="optimizer")).parameters
    return {key: parameters[key].default for key in keys if key in parameters}


def run_conditions(job: Job, data: Data) -> dict[str, Any]:
    """Return the settings and data that determine the results of a run, as plain values."""
    plain = as_dict(job.cfg)
    settings = job.settings
    values = values_of(settings)
    conditions: dict[str, Any] = {}
    for name, policy in RESUME.items():
        if policy == "refuse" or (policy != "free" and name not in values):
            conditions[name] = plain.get(name)
        elif policy != "free":
            conditions[name] = values[name]
    return conditions | {
        "lr_clock": str(settings.rate.lr_clock),
        "reference_batch_size": str(
            settings.rate.reference_batch_size
            or ReferenceBatch(settings.step_rows * job.ranks, "rows")
        ),
        "shuffle": bool(job.cfg.shuffle),
        "dataset": _fingerprint_rows(job, data),
        "rows": len(data.dataset),
        _KEPT: {key: value for key, value in plain["optimizer"].items() if key not in _IGNORED},
    }


def compare(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, allowed: Sequence[str], in_mid_epoch: bool
) -> tuple[list[str], bool]:
    """Return the keys that differ from the checkpoint, and whether the remaining rows of the epoch
    have become unknown.

    Raises:
        SettingError: a key differs without permission, or `allowed` lists a key that is not
            compared.
    """
    # Keys that must not differ, and keys that decide which rows an epoch or a step has.
    refused = {name for name, policy in RESUME.items() if policy == "refuse"}
    row_keys = {"dataset", *(name for name, policy in RESUME.items() if policy == "epoch")}
    choices = refused | row_keys | set(FILLS_STEPS) | set(_CHANGEABLE)
    for name in allowed:
        if name not in choices:
            raise SettingError(
                "resume_allow_changes",
                list(allowed),
                f"{name} is not one of {', '.join(sorted(choices))}",
            )
    if now["batch_tokens"]:
        row_keys |= set(FILLS_STEPS)
    differs = [
        name for name in now if name in saved and saved[name] != now[name] and name != "rows"
    ]
    if in_mid_epoch:
        refused |= row_keys
    for name in differs:
        if name in refused and name not in allowed:
            saved_value = _differing_part(name, saved, now)
            condition = ""
            # Weights and optimizer state are loaded into the model.
            if name == "model":
                condition = " where every weight keeps its shape"
            remedy = (
                f"the checkpoint was trained with {saved_value!r}; resume with that, or set"
                f" resume_allow_changes=[{name}]{condition}"
            )
            raise SettingError(name, _differing_part(name, now, saved), remedy)
    return differs, in_mid_epoch and any(name in row_keys for name in differs)


def _differing_part(name: str, conditions: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """Return the differing values of two settings; for a dataset, the number of rows and the start
    of its fingerprint.
    """
    value = conditions[name]
    other = others[name]
    if name == "dataset":
        return f"{count(conditions['rows'], 'row')}, {value[:8]}"
    if isinstance(value, dict) and isinstance(other, dict):
        differing = [key for key in value if key not in other or value[key] != other[key]]
        return {key: value[key] for key in differing}
    return value


def _fingerprint_rows(job: Job, data: Data) -> str:
    """Return a fingerprint of the dataset from the number of rows and a sample, independent of
    file paths.
    """
    rows = len(data.dataset)
    numbers = sorted(
        {round(i * (rows - 1) / max(1, _SAMPLED_ROWS - 1)) for i in range(min(rows, _SAMPLED_ROWS))}
    )
    with RandomState(job.device):
        # Seed the random augmentation of rows.
        torch.manual_seed(0)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        sampled = [_tokens(job, data.dataset[number]) for number in numbers]
    return fingerprint("rows", rows, numbers, sampled)


def _tokens(job: Job, row: Mapping[str, Any]) -> list[int]:
    return [int(token) for tokens, _ in job.task.sequences(row) for token in tokens]


class LostRun:
    """Record of an attempt that ended on all ranks: a limit that was too large, or a trial that did
    not finish.

    Reading is a collective and deletes a record of another run.

    Args:
        job: job of the run.
        name: name of the run.
        resumes: whether the run resumes from a checkpoint. A restart by torchrun may start without
            one.
        trials_name: fingerprint of the settings of trials; recorded trials with another one are
            ignored.
    """

    def __init__(self, job: Job, *, name: str, resumes: bool, trials_name: str) -> None:
        self._settings = job.settings
        self._path = Path(job.cfg.output_dir) / "adaptive_batch" / "lost.json"
        self._name = name
        self._trials_name = trials_name
        # The rank that fails may be on another machine.
        self._launch = distributed.from_rank_zero(distributed.launch_name)
        self._facts: dict[str, Any] = distributed.from_rank_zero(
            lambda: self._read(resumes=resumes)
        )

    def trial_rows(self, key: str) -> int | None:
        """Return the rows of a trial that ended all ranks, by a key of :data:`TRIALS`; None
        without one.
        """
        rows: int | None = self._facts.get(key)
        return rows

    def limit(self, conditions: Mapping[str, Any]) -> MicroBatchLimit | None:
        """Return the limit that ran out of memory under the same conditions, reduced; None
        without one.
        """
        amount = self._facts.get("limit")
        if not amount or any(self._facts[key] != value for key, value in conditions.items()):
            return None
        return MicroBatchLimit(amount, self._facts["unit"])

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
            conditions: function that returns the conditions of a training limit.
        """
        record = {"kind": "ended", "time": round(time.time(), 3), "message": message}
        record |= {"rank": distributed.rank(), "reason": kind, **facts}
        # Rank 0, which keeps the run log open, may hang in a collective.
        with self._path.with_name("run.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        shrinks = self._settings.on_out_of_memory == "shrink"
        self.keep(facts, conditions() if shrinks else None)

    def keep(self, facts: Mapping[str, Any], conditions: Mapping[str, Any] | None) -> None:
        """Record the end of the ranks, and keep facts of earlier attempts.

        Args:
            facts: facts of the rank that ended first.
            conditions: conditions of the limit; None to record no limit.
        """
        kept = {key: facts[key] for key in TRIALS if key in facts}
        if kept:
            kept["trial_settings"] = self._trials_name
        if "limit" in facts and conditions is not None:
            kept |= {"limit": facts["limit"], "unit": facts["unit"], **conditions}
        if kept:
            self._facts |= {"run": self._name, "launch": self._launch, **kept}
            atomic_write(self._path, json.dumps(self._facts))

    def _read(self, *, resumes: bool) -> dict[str, Any]:
        try:
            facts: dict[str, Any] = json.loads(self._path.read_text())
            is_restart = facts["launch"] is not None and facts["launch"] == self._launch
            if not (is_restart or (resumes and facts["run"] == self._name)):
                self._path.unlink()
                return {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        if facts.get("trial_settings") != self._trials_name:
            facts = {key: value for key, value in facts.items() if not key.startswith("trial_")}
        return facts

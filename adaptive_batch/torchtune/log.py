"""What a run logs and writes down: where it starts, what differs, each epoch, each step."""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import OmegaConf
from torchtune import training
from tqdm.contrib.logging import logging_redirect_tqdm

from adaptive_batch import __version__, distributed
from adaptive_batch._util import ProgressBar, atomic_write, count
from adaptive_batch.data import Batches
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.report import RunLog
from adaptive_batch.schedules import Progress
from adaptive_batch.training import (
    PLACE_OF_STEP,
    AdaptiveRate,
    FullBatchLoss,
    LimitChange,
    StepResult,
)

from .config_errors import instantiate
from .data import Data
from .job import Job
from .preview import TrainingPlan, TrainingPreview
from .resume import ResumedRun

log = logging.getLogger("adaptive_batch")
Item = TypeVar("Item")


class _Trained:
    """What the steps of this process came to."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._step_seconds = 0.0
        self._tokens = 0
        self.last_loss = math.nan
        self.last_step = 0

    def add(self, result: StepResult, *, step: int, seconds: float) -> None:
        """Add a step."""
        self.last_step = step
        self.last_loss = result.loss
        self._step_seconds += seconds
        self._tokens += result.tokens

    def resume(self, step: int) -> None:
        """Take it that so many steps were trained before."""
        self.last_step = step

    @property
    def seconds(self) -> float:
        """Time since the process began to train."""
        return time.monotonic() - self._began

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of a second in steps; None without a step, as of a run that was ended in its last
        save.
        """
        if not self._step_seconds:
            return None
        return self._tokens / self._step_seconds


class _MetricLogger:
    """torchtune's metric logger, where one is configured; rank zero opens it.

    Attributes:
        every_n_steps: steps from one record of their metrics to the next.
    """

    def __init__(self, job: Job) -> None:
        self._cfg = job.cfg
        self._device = job.device
        self._logger: Any = None
        self.every_n_steps = job.settings.log_every_n_steps or 1
        asked = bool(self._cfg.get("log_peak_memory_stats", False))
        self._logs_memory = asked and job.device.type != "cpu"

    def open(self) -> None:
        """Open it, where one is configured."""
        cfg = self._cfg
        if cfg.metric_logger is None:
            return
        component = str(cfg.metric_logger.get("_component_", ""))
        # torchtune's logger leaves an error behind where it cannot be made.
        if component.endswith(".TensorBoardLogger") and find_spec("tensorboard") is None:
            remedy = "tensorboard is not installed: pip install tensorboard"
            raise SettingError("metric_logger", component, remedy)
        self._logger = instantiate("metric_logger", cfg.metric_logger)
        self._logger.log_config(cfg)

    def memory(self) -> Mapping[str, float]:
        """Return the peaks of the device's memory, where they are logged."""
        if self._logger is None or not self._logs_memory:
            return {}
        peaks: Mapping[str, float] = training.get_memory_stats(device=self._device)
        return peaks

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Log metrics of a step."""
        if self._logger is not None:
            self._logger.log_dict(metrics, step=step)

    def close(self) -> None:
        """Close it, if it was opened."""
        if self._logger is not None:
            self._logger.close()


class TrainingLog:
    """The run log and the metric logger of a run; of several ranks, rank zero writes them.

    Until :meth:`open` nothing is written, so that a run which is refused leaves no file.
    """

    def __init__(self, job: Job, data: Data) -> None:
        self._job = job
        self._data = data
        self._settings = job.settings
        self._cfg = job.cfg
        self._folder = Path(job.cfg.output_dir)
        self._config_path = self._folder / "adaptive_batch" / "config.yaml"
        self._record = RunLog(self._folder, enabled=False)
        self._metrics = _MetricLogger(job)
        self._trained = _Trained()
        self._bar = ProgressBar(0, "steps", shown=False)
        self._step_began = 0.0
        # What an epoch has logged, which the next one need not repeat.
        self._repeated: set[str] = set()

    def open(self) -> None:
        """Open both; all ranks call it."""
        record = distributed.on_rank_zero(lambda: RunLog(self._folder))
        if record is None:
            return
        self._record = record
        atomic_write(self._config_path, OmegaConf.to_yaml(self._cfg, resolve=True, sort_keys=True))
        self._metrics.open()

    def close(self) -> None:
        """Close both, if they were opened."""
        self._metrics.close()
        self._record.close()

    def sync(self) -> None:
        """Flush the run log to disk, so that nothing saved afterwards is ahead of it."""
        self._record.sync()

    def event(self, kind: str, message: str, *, prints: bool = True, **facts: Any) -> None:
        """Write down an event with its facts, and log its message unless `prints` is False."""
        self._record.event(kind, message, prints=prints, **facts)

    def limit_change(self, change: LimitChange, *, kind: str = "limit") -> None:
        """Log at once what a micro-batch holds from now on."""
        self.event(kind, change.describe(), **change.facts())

    def progress_bar(self, steps: Iterable[Item], *, total: int, done: int) -> Iterator[Item]:
        """Yield the steps that are left of an epoch, and show how far it has come, as tqdm does; a
        line that is logged meanwhile stands above the bar. A step's time begins as it is asked for.
        """
        with (
            logging_redirect_tqdm([logging.getLogger("adaptive_batch")]),
            ProgressBar(total, "steps", done=done, shown=distributed.is_rank_zero()) as self._bar,
        ):
            self._step_began = time.perf_counter()
            for step in steps:
                yield step
                self._step_began = time.perf_counter()

    # --- where a run begins

    def starts(self, run: ResumedRun, *, replaces: str) -> None:
        """Log where training starts or resumes, and with which checkpoint.

        Args:
            run: state that the run begins with.
            replaces: saves of other runs that this one replaces, in words.
        """
        event = self.event
        progress = run.progress
        rows = len(self._data.dataset)
        self._trained.resume(progress.steps)
        for line in run.found.passed_over:
            event("passed_over", line)
        point = run.found.point
        ranks = distributed.world_size()
        begins = f"resuming from {point.path}" if point else "starting"
        within = ""
        if progress.epoch_steps:
            within = f", row {progress.epoch_rows} of it (step {progress.steps})"
        of_ranks = f", {ranks} ranks" if ranks > 1 else ""
        event(
            "start",
            f"{begins} with epoch {progress.epoch}{within}; {count(rows, 'row')}{of_ranks}",
            resumed=point is not None,
            run=run.name,
            rows=rows,
            ranks=ranks,
            progress=progress.state_dict(),
        )
        # After the record that an attempt is known by.
        event(
            "config",
            f"the configuration is in {self._config_path}",
            settings=_what_is_run(self._job),
        )
        if run.begins_epoch_again:
            message = (
                f"epoch {progress.epoch} begins again: which of its rows are left is not known with"
                " other rows"
            )
            event("epoch_restarted", message, epoch=progress.epoch)
        if replaces:
            message = f"{replaces} will be replaced once the first save of this run is complete"
            event("replaces", message)

    def changes(self, run: ResumedRun, *, without_effect: Mapping[str, str]) -> None:
        """Log each setting that differs from the checkpoint's, or that has no effect, with the
        reason.

        Args:
            run: run that is resumed.
            without_effect: messages by key, see :func:`.checks.without_effect`.
        """
        for kind, message, facts in (*run.changes_of_steps(), *run.changes()):
            self.event(kind, message, **facts)
        for key, message in without_effect.items():
            self.event("no_effect", message, key=key)
        if self._settings.optimizer_in_bwd and self._cfg.get("on_out_of_memory") is None:
            message = (
                "with the optimizer in backward a step that runs out of memory has changed some"
                " weights already"
            )
            self.event(
                "on_out_of_memory", f"on_out_of_memory=raise: {message}, so it is not run again"
            )

    def too_short(self) -> None:
        """Log a step that asks for more rows than the dataset has."""
        settings = self._settings
        num_rows = len(self._data.dataset)
        global_rows = settings.step_rows * self._job.ranks
        if not settings.step_varies and global_rows > num_rows:
            rows = count(num_rows, "row")
            message = f"a step of {global_rows} rows is cut to {rows}: the dataset has no more"
            self.event("no_effect", message)

    def whose_rate(self, saved: float) -> None:
        """Log where the checkpoint's learning rate is not the configured one."""
        configured = self._cfg.optimizer.get("lr")
        if configured is not None and not math.isclose(float(configured), saved, rel_tol=1e-6):
            message = f"optimizer.lr={configured} has no effect: the checkpoint's {saved:g} is kept"
            message += "; resume_allow_changes=[optimizer.lr] changes it"
            self.event("lr", message, configured=float(configured), lr=saved)

    def rate_and_stages(
        self,
        rate: AdaptiveRate,
        preview: TrainingPreview,
        ahead: TrainingPlan,
        saved: Mapping[str, Any],
    ) -> None:
        """Log how the learning rate is scaled, and the stages of what is left of training."""
        settings = self._settings
        event = self.event
        now = settings.rate.lr_scaling
        saved_rule = saved.get("learning_rate", {}).get("rule", now)
        if saved_rule != now:
            changed = f"lr_scaling {saved_rule} -> {now}: not what the checkpoint was trained with"
            event("lr_scaling", changed, before=saved_rule, after=now)
        message = rate.describe()
        if message:
            event("lr", message, reference=str(rate.reference), rule=settings.rate.lr_scaling)
        scheduler = self._cfg.get("lr_scheduler") or {}
        warmup_steps = scheduler.get("num_warmup_steps") or 0
        if warmup_steps >= ahead.schedule_steps > 0:
            message = (
                f"lr_scheduler.num_warmup_steps={warmup_steps}: the run has"
                f" {count(ahead.schedule_steps, 'step')}, so the rate never reaches {rate.base:g}"
            )
            event("lr_scheduler", message)
        if not settings.grows or ahead.progress.epoch >= settings.epochs:
            return
        table, stages = preview.table(ahead, base_rate=rate.base)
        event("stages", f"the plan:\n{table}", stages=stages)
        if settings.batch_size_schedule:
            self._log_unscaled(rate, ahead.full_batch_rows)

    def _log_unscaled(self, rate: AdaptiveRate, batch: int) -> None:
        configured = self._settings.step_rows * self._job.ranks
        message = rate.describe_unscaled(batch, configured=configured)
        if message:
            self.event("lr", message, prints=self.is_new(message), global_batch=batch)

    def is_new(self, line: str) -> bool:
        """Return whether a line is logged for the first time."""
        is_new = line not in self._repeated
        self._repeated.add(line)
        return is_new

    # --- training

    def epoch(self, batches: Batches, rate: AdaptiveRate) -> None:
        """Log the epoch that begins, where anything adaptive is on."""
        epoch = batches.progress.epoch
        plan = batches.plan
        settings = self._settings
        holds = batches.limit
        if not settings.adaptive:
            return
        content = plan.describe()
        if settings.batch_tokens and settings.batch_size_schedule is None:
            content += f", up to {count(settings.batch_tokens * self._job.ranks, 'token')}"
        content += f"; a micro-batch holds {holds}"
        self.event(
            "plan",
            f"epoch {epoch}: {content}",
            prints=self.is_new(content),
            epoch=epoch,
            global_batch=plan.global_rows,
            batch_size=batches.batch_size,
            batch_tokens=settings.batch_tokens,
            limit=holds.amount,
            unit=holds.unit,
            steps=plan.steps,
        )
        # The plan of a schedule shows its batches.
        if settings.batch_size_schedule is None:
            self._log_unscaled(rate, plan.global_rows)

    def step(
        self,
        result: StepResult,
        progress: Progress,
        *,
        rates: Mapping[str, float],
        numbers: Sequence[int],
        num_out_of_memory: int,
        full_batch_loss: FullBatchLoss,
    ) -> None:
        """Write down a step of the rows that have these numbers, after which progress is as given,
        and log its metrics; its time ends here.
        """
        seconds = time.perf_counter() - self._step_began
        self._trained.add(result, step=progress.steps, seconds=seconds)
        label_tokens = float(result.label_tokens)
        trained_tokens = result.tokens if self._job.task.counts_rows else label_tokens
        record = result.record(
            progress,
            numbers=numbers,
            seconds=seconds,
            rates=rates,
            num_out_of_memory=num_out_of_memory,
        )
        record["tokens_per_second_per_gpu"] = trained_tokens / (
            seconds * distributed.data_parallel_size()
        )
        full = full_batch_loss.add(result.loss, label_tokens=label_tokens, rows=result.rows)
        if full is not None:
            record["loss_per_full_batch"] = full
        if self._settings.measures_noise and progress.noise_scale is not None:
            record["gradient_noise_scale"] = progress.noise_scale
        record.update(self._metrics.memory())
        self._record.step(**record)
        if progress.steps % self._metrics.every_n_steps == 0:
            metrics = {key: record[key] for key in record if key not in PLACE_OF_STEP}
            self._metrics.log(metrics, step=progress.steps)
        self._bar.advance(f"{progress.epoch + 1}|{progress.steps}|Loss: {result.loss:.4f}")

    def ends(self, progress: Progress) -> None:
        """Log what training came to, where it is saved, and what to run next."""
        trained = f"{count(progress.steps, 'step')}, {count(progress.samples, 'sample')} trained"
        seconds = self._trained.seconds
        speed = self._trained.tokens_per_second
        figures = ""
        facts: dict[str, Any] = {}
        if speed is not None:
            loss = f"loss {self._trained.last_loss:.4f} in the last step"
            figures = f": {loss}, {speed:,.0f} tokens/s in steps"
            facts = {"tokens_per_second": round(speed, 1)}
        epoch = Path(self._cfg.checkpointer.output_dir) / f"epoch_{self._settings.epochs - 1}"
        report = f"adaptive-batch report {self._cfg.output_dir}"
        message = f"{trained}{figures}, {seconds:.1f} s in all\nsaved in {epoch}; next: {report}"
        self.event("end", message, seconds=round(seconds, 3), **facts)

    def failed_save(self, error: CheckpointError) -> None:
        """Log that a resume point could not be written."""
        message = f"training continues; this checkpoint was not saved: {error}"
        self.event("checkpoint_failed", message, step=self._trained.last_step)

    def validation(self, loss: float, *, rows: int, step: int) -> None:
        """Log a validation, and its metric."""
        message = f"step {step}: val_loss {loss:.4f} over {count(rows, 'row')}"
        self.event("validation", message, steps=step, val_loss=loss)
        self._metrics.log({"val_loss": loss}, step=step)


def _what_is_run(job: Job) -> dict[str, str]:
    """Return what tells this run from others, for the head of its report."""
    cfg = job.cfg
    dataset = OmegaConf.to_container(cfg.dataset, resolve=True)
    return {
        "command": shlex.join(["tune", "run", Path(sys.argv[0]).stem, *sys.argv[1:]]),
        "model": str(cfg.model._component_),
        "base": str(cfg.checkpointer.checkpoint_dir),
        "dataset": json.dumps(dataset),
        "optimizer": f"{cfg.optimizer._component_}, lr {cfg.optimizer.get('lr')}",
        "seed": str(cfg.seed),
        "device": f"{job.device}, {cfg.dtype}, {count(distributed.world_size(), 'rank')}",
        "versions": f"adaptive_batch {__version__}, torch {torch.__version__}",
    }

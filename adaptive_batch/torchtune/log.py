"""Run log, metric logger and profiler of a run."""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config, training
from tqdm.contrib.logging import logging_redirect_tqdm

from adaptive_batch import __version__, distributed
from adaptive_batch._util import ProgressBar, atomic_write, count
from adaptive_batch.data import Batches
from adaptive_batch.report import RunLog, started_runs
from adaptive_batch.schedules import Progress
from adaptive_batch.training import PLACE_OF_STEP, AdaptiveRate, LimitChange, StepResult

from .configuration import instantiate, refusing
from .job import Job
from .plan import TrainingPlan, TrainingPreview
from .resume import ResumedRun

log = logging.getLogger("adaptive_batch")
Item = TypeVar("Item")

_PROFILER = "torchtune.training.setup_torch_profiler"


class TrainingLog:
    """Run log and metric logger of a run, written by rank 0.

    Nothing is written before :meth:`start`, so a refused run leaves no file.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._settings = job.settings
        self._cfg = job.cfg
        self._folder = Path(job.cfg.output_dir)
        self._config_path = self._folder / "adaptive_batch" / "config.yaml"
        # It writes nothing until _open() replaces it on rank 0.
        self._run_log = RunLog(self._folder, enabled=False)
        # torchtune's metric logger on rank 0; None before _open(), on other ranks and without one.
        self._metric_logger: Any = None
        self._every_n_steps = job.settings.log_every_n_steps or 1
        self._logs_memory = job.cfg.get("log_peak_memory_stats", False) and job.device.type != "cpu"
        self._begin_time = time.monotonic()
        # Sums over all steps of this process.
        self._step_seconds = 0.0
        self._tokens = 0
        # Loss of the last step with labels.
        self._last_loss = math.nan
        # progress_bar() replaces both in each epoch.
        self._bar = ProgressBar(0, "steps", shown=False)
        self._step_begin_time = 0.0

    def _open(self, run: ResumedRun) -> None:
        """Open both logs on rank 0; a collective.

        The log of a run that resumes from another folder begins with the log of that folder.
        """

        def open_run_log() -> RunLog:
            has_started_here = run.name in started_runs(self._folder)
            run_log = RunLog(self._folder)
            checkpoint = run.found.checkpoint
            if checkpoint and not has_started_here:
                origin = checkpoint.path.parent.resolve()
                if origin != self._folder.resolve():
                    run_log.copy(origin)
            return run_log

        run_log = distributed.on_rank_zero(open_run_log)
        # None on other ranks, which log nothing.
        if run_log is None:
            return
        self._run_log = run_log
        atomic_write(self._config_path, OmegaConf.to_yaml(self._cfg, resolve=True, sort_keys=True))
        if self._cfg.metric_logger is not None:
            self._metric_logger = instantiate("metric_logger", self._cfg.metric_logger)
            self._metric_logger.log_config(self._cfg)

    def close(self) -> None:
        """Close both logs, if they are open."""
        if self._metric_logger is not None:
            self._metric_logger.close()
        self._run_log.close()

    def sync(self) -> None:
        """Flush the run log to disk, so that nothing saved afterwards is ahead of it."""
        self._run_log.sync()

    def event(self, kind: str, message: str, *, prints: bool = True, **facts: Any) -> None:
        """Record an event with its facts, and log its message unless `prints` is False."""
        self._run_log.event(kind, message, prints=prints, **facts)

    def limit_change(self, change: LimitChange) -> None:
        """Log a changed limit of micro-batches."""
        self.event(change.kind, change.describe(), **change.facts())

    def progress_bar(self, steps: Iterable[Item], batches: Batches) -> Iterator[Item]:
        """Yield the remaining steps of an epoch under a tqdm bar. Log lines appear above the bar.

        The time of a step includes waiting for its rows.
        """
        total = batches.plan.steps
        done = batches.progress.epoch_steps
        with (
            logging_redirect_tqdm([logging.getLogger("adaptive_batch")]),
            ProgressBar(total, "steps", done=done, shown=distributed.is_rank_zero()) as self._bar,
        ):
            self._step_begin_time = time.perf_counter()
            for step in steps:
                yield step
                # The next step begins when the loop asks for its rows.
                self._step_begin_time = time.perf_counter()

    # --- start of a run

    def start(self, run: ResumedRun, *, num_rows: int, replaces: str) -> None:
        """Open the logs. Log where training starts or resumes, and what differs from the
        checkpoint.

        Args:
            run: state at the start of the run.
            num_rows: number of rows of the dataset.
            replaces: description of other runs' saves that this run replaces.
        """
        self._open(run)
        progress = run.progress
        for line in run.found.passed_over:
            self.event("passed_over", line)
        checkpoint = run.found.checkpoint
        ranks = distributed.world_size()
        begins = f"resuming from {checkpoint.path}" if checkpoint else "starting"
        place = f"epoch {progress.epoch}, row {progress.epoch_rows}, step {progress.steps}"
        self.event(
            "start",
            f"{begins} at {place}; {count(num_rows, 'row')}, {count(ranks, 'rank')}",
            resumed=checkpoint is not None,
            run=run.name,
            rows=num_rows,
            ranks=ranks,
            progress=progress.state_dict(),
        )
        # After the `start` record: readers of the log begin a new attempt at each `start`.
        self.event(
            "config",
            f"the configuration is in {self._config_path}",
            settings=_report_head(self._job),
        )
        if run.restarts_epoch:
            message = (
                f"epoch {progress.epoch} starts again: the rows have changed, so its remaining rows"
                " are unknown"
            )
            self.event("epoch_restarted", message, epoch=progress.epoch)
        for kind, message, facts in run.changes:
            self.event(kind, message, **facts)
        if replaces:
            message = f"{replaces} will be replaced once the first save of this run is complete"
            self.event("replaces", message)

    def rate_and_stages(
        self,
        rate: AdaptiveRate,
        preview: TrainingPreview,
        remaining: TrainingPlan,
    ) -> None:
        """Log the scaling of the learning rate and the stages of the remaining training."""
        settings = self._settings
        message = rate.describe()
        if message:
            self.event("lr", message, reference=str(rate.reference), rule=settings.lr_scaling)
        if not remaining.stages:
            return
        text, stages = preview.table(remaining)
        self.event("stages", f"the plan:\n{text}", stages=stages)
        if settings.batch_size_schedule:
            self._log_unscaled(rate, remaining.full_batch_rows)

    def _log_unscaled(self, rate: AdaptiveRate, batch: int) -> None:
        """Log a learning rate that is not scaled although the batch has changed."""
        message = rate.describe_unscaled(batch)
        if message:
            self.event("lr", message, global_batch=batch)

    # --- training

    def epoch(self, batches: Batches, rate: AdaptiveRate) -> None:
        """Log the plan of the epoch that begins, if an adaptive key is set."""
        settings = self._settings
        if not settings.adaptive:
            return
        epoch = batches.progress.epoch
        plan = batches.plan
        limit = batches.limit
        self.event(
            "plan",
            f"epoch {epoch}: {plan.describe()}; a micro-batch holds {limit}",
            epoch=epoch,
            global_batch=plan.global_rows,
            batch_size=batches.batch_size,
            batch_tokens=settings.batch_tokens,
            limit=limit.amount,
            unit=limit.unit,
            steps=plan.steps,
        )
        # With a schedule, rate_and_stages() logs this once for the whole training.
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
        full_batch_loss: float | None,
    ) -> None:
        """Write a finished step to the run log, and its metrics to the metric logger. The time of
        the step ends here.

        Args:
            result: result of the step.
            progress: progress after the step.
            rates: learning rate and other scaled values of the optimizer in the step, by name.
            numbers: numbers of the step's rows in the dataset.
            num_out_of_memory: out-of-memory errors of the run so far.
            full_batch_loss: mean loss of a full batch that this step completes; None without one.
        """
        seconds = time.perf_counter() - self._step_begin_time
        # Only rows with labels run, so a step without one has no micro-batch.
        if not result.micro_batches:
            message = f"step {progress.steps}: no row has a label, so the step changes nothing"
            self.event("no_labels", message, step=progress.steps)
        self._step_seconds += seconds
        self._tokens += result.tokens
        # torchtune's recipes count label tokens; labels of a task that counts rows are rows.
        tokens = float(result.tokens if self._job.task.counts_rows else result.num_labels)
        record = result.record(
            progress,
            numbers=numbers,
            seconds=seconds,
            rates=rates,
            num_out_of_memory=num_out_of_memory,
        )
        if record["loss"] is not None:
            self._last_loss = record["loss"]
        gpu_seconds = seconds * distributed.data_parallel_size()
        record["tokens_per_second_per_gpu"] = tokens / gpu_seconds
        if full_batch_loss is not None:
            record["loss_per_full_batch"] = full_batch_loss
        if self._settings.measures_noise and progress.noise_scale is not None:
            record["gradient_noise_scale"] = progress.noise_scale
        if self._logs_memory and self._metric_logger is not None:
            record.update(training.get_memory_stats(device=self._job.device))
        self._run_log.step(**record)
        if progress.steps % self._every_n_steps == 0:
            metrics = {key: record[key] for key in record if key not in PLACE_OF_STEP}
            # A step without labels has no loss, and metric loggers take only numbers.
            if metrics["loss"] is None:
                del metrics["loss"]
            self._log_metrics(metrics, step=progress.steps)
        self._bar.advance(f"{progress.epoch + 1}|{progress.steps}|Loss: {self._last_loss:.4f}")

    def end(self, progress: Progress) -> None:
        """Log the totals of training, the path of the weights and the next command."""
        trained = f"{count(progress.steps, 'step')}, {count(progress.samples, 'sample')} trained"
        seconds = time.monotonic() - self._begin_time
        tokens_per_second = self._tokens / max(self._step_seconds, 1e-9)
        export = Path(self._cfg.checkpointer.output_dir) / f"epoch_{self._settings.epochs - 1}"
        self.event(
            "end",
            f"{trained}: loss {self._last_loss:.4f} in the last step,"
            f" {tokens_per_second:,.0f} tokens/s in steps, {seconds:.1f} s in all\n"
            f"saved in {export}; next: adaptive-batch report {self._cfg.output_dir}",
            seconds=round(seconds, 3),
            tokens_per_second=round(tokens_per_second, 1),
        )

    def end_epoch(self, batches: Batches) -> None:
        """Log how many rows the epoch used."""
        message, facts = batches.describe_epoch()
        self.event("epoch", message, **facts)

    def validation(self, loss: float, *, rows: int, step: int) -> None:
        """Log the loss of a validation."""
        message = f"step {step}: val_loss {loss:.4f} over {count(rows, 'row')}"
        self.event("validation", message, steps=step, val_loss=loss)
        self._log_metrics({"val_loss": loss}, step=step)

    def _log_metrics(self, metrics: Mapping[str, Any], *, step: int) -> None:
        if self._metric_logger is not None:
            self._metric_logger.log_dict(metrics, step=step)


def _report_head(job: Job) -> dict[str, str]:
    """Return the identification of this run for the head of its report."""
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


def build_profiler(cfg: DictConfig) -> tuple[Any, DictConfig]:
    """Return torchtune's profiler, which does nothing unless it is enabled, and its block of the
    configuration with all defaults.
    """
    # torchtune fills in defaults for absent keys, but not for null.
    given = {key: value for key, value in (cfg.get("profiler") or {}).items() if value is not None}
    block = {"_component_": _PROFILER, **(given or {"enabled": False})}
    with refusing("profiler", block["_component_"], f"check its arguments, or give {_PROFILER}"):
        profiler, complete = config.instantiate(OmegaConf.create(block))
    return profiler, complete


def record_memory_history(cfg: DictConfig, device: torch.device, progress: Progress) -> None:
    """Start or stop recording the CUDA allocator's history before a step. As in torchtune, it is
    recorded in the first epoch while the profiler is active.

    Args:
        cfg: block of the profiler with all defaults.
        device: device of the run.
        progress: progress before the step.
    """
    records = cfg["enabled"] and cfg.get("profile_memory", False) and device.type == "cuda"
    if not (records and progress.epoch == 0 and distributed.is_rank_zero()):
        return
    first_step = cfg["wait_steps"] + cfg["warmup_steps"]
    if progress.epoch_steps == first_step:
        torch.cuda.memory._record_memory_history()
    # torchtune stops one step after the profiler.
    elif progress.epoch_steps == first_step + cfg["active_steps"] + 1:
        torch.cuda.memory._record_memory_history(enabled=None)

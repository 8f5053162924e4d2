"""Log, metric logger, counts of the steps and profiler of a run."""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import training
from tqdm.contrib.logging import logging_redirect_tqdm

from adaptive_batch import __version__, distributed
from adaptive_batch._util import ProgressBar, atomic_write, count
from adaptive_batch.data import Batches, PlannedRows
from adaptive_batch.errors import CheckpointError, NonfiniteLossError, SettingError
from adaptive_batch.report import RunLog
from adaptive_batch.schedules import NoiseScale, Progress
from adaptive_batch.training import (
    PLACE_OF_STEP,
    AdaptiveRate,
    FullBatchLoss,
    LimitChange,
    NonfiniteSteps,
    StepResult,
)

from .config_errors import instantiate
from .data import Data
from .job import Job
from .preview import TrainingPlan, TrainingPreview
from .resume import ResumedRun

if TYPE_CHECKING:
    from .settings import Settings
    from .store import Saver
    from .trainer import Trainer

log = logging.getLogger("adaptive_batch")
Item = TypeVar("Item")

# Minimum share of padding for a log message.
_MUCH_PADDING = 0.3
_PROFILER = "torchtune.training.setup_torch_profiler"


class _MetricLogger:
    """torchtune's metric logger, opened on rank 0 if configured.

    Attributes:
        every_n_steps: interval of records in steps.
    """

    def __init__(self, job: Job) -> None:
        self._cfg = job.cfg
        self._device = job.device
        self._logger: Any = None
        self.every_n_steps = job.settings.log_every_n_steps or 1
        asked = bool(self._cfg.get("log_peak_memory_stats", False))
        self._logs_memory = asked and job.device.type != "cpu"

    def open(self) -> None:
        """Open the metric logger, if configured."""
        cfg = self._cfg
        if cfg.metric_logger is None:
            return
        component = str(cfg.metric_logger.get("_component_", ""))
        # torchtune's logger prints an error at exit if its constructor fails.
        if component.endswith(".TensorBoardLogger") and find_spec("tensorboard") is None:
            remedy = "tensorboard is not installed: pip install tensorboard"
            raise SettingError("metric_logger", component, remedy)
        self._logger = instantiate("metric_logger", cfg.metric_logger)
        self._logger.log_config(cfg)

    def memory(self) -> Mapping[str, float]:
        """Return the peak memory of the device if it is logged."""
        if self._logger is None or not self._logs_memory:
            return {}
        peaks: Mapping[str, float] = training.get_memory_stats(device=self._device)
        return peaks

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Log metrics of a step."""
        if self._logger is not None:
            self._logger.log_dict(metrics, step=step)

    def close(self) -> None:
        """Close the metric logger, if open."""
        if self._logger is not None:
            self._logger.close()


class TrainingLog:
    """Run log and metric logger of a run, written by rank 0.

    Nothing is written before :meth:`open`, so a refused run leaves no file.
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
        self.profiler = RunProfiler(job.cfg.get(training.PROFILER_KEY, None), job.device)
        self._began = time.monotonic()
        self._step_seconds = 0.0
        self._tokens = 0
        # Loss of the last step with labels.
        self._last_loss = math.nan
        self._last_step = 0
        self._bar = ProgressBar(0, "steps", shown=False)
        self._step_began = 0.0
        # Messages that are logged once per run.
        self._repeated: set[str] = set()

    def open(self) -> None:
        """Open both logs on all ranks."""
        record = distributed.on_rank_zero(lambda: RunLog(self._folder))
        if record is None:
            return
        self._record = record
        atomic_write(self._config_path, OmegaConf.to_yaml(self._cfg, resolve=True, sort_keys=True))
        self._metrics.open()

    def monitor(self, trainer: Trainer, saver: Saver, **options: Any) -> StepMonitor:
        """Return what counts the steps of the run for this log, see :class:`StepMonitor`."""
        return StepMonitor(self._job, trainer, self, saver, **options)

    def close(self) -> None:
        """Close both, if they were opened."""
        self._metrics.close()
        self._record.close()

    def sync(self) -> None:
        """Flush the run log to disk, so that nothing saved afterwards is ahead of it."""
        self._record.sync()

    def event(self, kind: str, message: str, *, prints: bool = True, **facts: Any) -> None:
        """Record an event with its facts, and log its message unless `prints` is False."""
        self._record.event(kind, message, prints=prints, **facts)

    def limit_change(self, change: LimitChange, *, kind: str = "limit") -> None:
        """Log a changed limit of micro-batches."""
        self.event(kind, change.describe(), **change.facts())

    def progress_bar(self, steps: Iterable[Item], batches: Batches) -> Iterator[Item]:
        """Yield the remaining steps of an epoch under a tqdm bar. Log lines appear above the bar.
        The time of a step starts when it is requested.
        """
        total = batches.plan.steps
        done = batches.progress.epoch_steps
        with (
            logging_redirect_tqdm([logging.getLogger("adaptive_batch")]),
            ProgressBar(total, "steps", done=done, shown=distributed.is_rank_zero()) as self._bar,
        ):
            self._step_began = time.perf_counter()
            for step in steps:
                yield step
                self._step_began = time.perf_counter()

    # --- start of a run

    def start(self, run: ResumedRun, *, replaces: str) -> None:
        """Log the start or the resumed checkpoint of training.

        Args:
            run: state at the start of the run.
            replaces: description of other runs' saves that this run replaces.
        """
        event = self.event
        progress = run.progress
        rows = len(self._data.dataset)
        self._last_step = progress.steps
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
        # Written after the `start` record, which identifies an attempt.
        event(
            "config",
            f"the configuration is in {self._config_path}",
            settings=_report_head(self._job),
        )
        if run.begins_epoch_again:
            message = (
                f"epoch {progress.epoch} starts again: the rows have changed, so its remaining rows"
                " are unknown"
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

    def cut_step(self) -> None:
        """Log that a step is cut to the rows of a smaller dataset."""
        settings = self._settings
        num_rows = len(self._data.dataset)
        global_rows = settings.step_rows * self._job.ranks
        if not settings.step_varies and global_rows > num_rows:
            rows = count(num_rows, "row")
            message = f"a step of {global_rows} rows is cut to {rows}: the dataset has no more"
            self.event("no_effect", message)

    def kept_rate(self, saved: float) -> None:
        """Log that a checkpoint's learning rate is kept instead of another configured one."""
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
        """Log the scaling of the learning rate and the stages of the remaining training."""
        settings = self._settings
        event = self.event
        now = settings.rate.lr_scaling
        saved_rule = saved.get("learning_rate", {}).get("rule", now)
        if saved_rule != now:
            changed = f"lr_scaling {saved_rule} -> {now}: differs from the checkpoint"
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
        """Write a finished step to the run log, and its metrics to the metric logger; stop its
        clock.

        Args:
            result: result of the step.
            progress: progress after the step.
            rates: learning rate and other scaled values of the optimizer in the step, by name.
            numbers: numbers of the step's rows in the dataset.
            num_out_of_memory: out-of-memory errors of the run so far.
            full_batch_loss: mean of the loss over the rows of a full batch, which the step joins.
        """
        seconds = time.perf_counter() - self._step_began
        self._step_seconds += seconds
        self._tokens += result.tokens
        self._last_step = progress.steps
        label_tokens = float(result.label_tokens)
        trained_tokens = result.tokens if self._job.task.counts_rows else label_tokens
        record = result.record(
            progress,
            numbers=numbers,
            seconds=seconds,
            rates=rates,
            num_out_of_memory=num_out_of_memory,
        )
        if record["loss"] is not None:
            self._last_loss = record["loss"]
        record["tokens_per_second_per_gpu"] = trained_tokens / (
            seconds * distributed.data_parallel_size()
        )
        full_loss = full_batch_loss.add(result.loss, label_tokens=label_tokens, rows=result.rows)
        if full_loss is not None:
            record["loss_per_full_batch"] = full_loss
        if self._settings.measures_noise and progress.noise_scale is not None:
            record["gradient_noise_scale"] = progress.noise_scale
        record.update(self._metrics.memory())
        self._record.step(**record)
        if progress.steps % self._metrics.every_n_steps == 0:
            metrics = {key: record[key] for key in record if key not in PLACE_OF_STEP}
            if metrics["loss"] is None:
                del metrics["loss"]
            self._metrics.log(metrics, step=progress.steps)
        self._bar.advance(f"{progress.epoch + 1}|{progress.steps}|Loss: {self._last_loss:.4f}")

    def end(self, progress: Progress) -> None:
        """Log the totals of training, the path of the weights and the next command."""
        trained = f"{count(progress.steps, 'step')}, {count(progress.samples, 'sample')} trained"
        seconds = time.monotonic() - self._began
        figures = ""
        facts: dict[str, Any] = {}
        # A run that was stopped in its last save has no step.
        if self._step_seconds:
            speed = self._tokens / self._step_seconds
            loss = f"loss {self._last_loss:.4f} in the last step"
            figures = f": {loss}, {speed:,.0f} tokens/s in steps"
            facts = {"tokens_per_second": round(speed, 1)}
        epoch = Path(self._cfg.checkpointer.output_dir) / f"epoch_{self._settings.epochs - 1}"
        report = f"adaptive-batch report {self._cfg.output_dir}"
        message = f"{trained}{figures}, {seconds:.1f} s in all\nsaved in {epoch}; next: {report}"
        self.event("end", message, seconds=round(seconds, 3), **facts)

    def failed_save(self, error: CheckpointError) -> None:
        """Log that a checkpoint could not be written."""
        message = f"training continues; this checkpoint was not saved: {error}"
        self.event("checkpoint_failed", message, step=self._last_step)

    def validation(self, loss: float, *, rows: int, step: int) -> None:
        """Log the loss of a validation."""
        message = f"step {step}: val_loss {loss:.4f} over {count(rows, 'row')}"
        self.event("validation", message, steps=step, val_loss=loss)
        self._metrics.log({"val_loss": loss}, step=step)


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


def keys_against_padding(settings: Settings) -> str:
    """Name a key that would reduce padding; empty if there is none."""
    if settings.uniform_micro_batches in ("lengths", "both"):
        return (
            f"uniform_micro_batches={settings.uniform_micro_batches} pads all of a step to one"
            " length"
        )
    # A step that must run in one micro-batch cannot be split by length.
    can_split = settings.uniform_micro_batches is None and not settings.optimizer_in_bwd
    if can_split and settings.micro_batch.micro_batch_tokens is None:
        instead = ", without micro_batch_size," if settings.micro_batch.is_given else ""
        return (
            f"micro_batch_tokens=auto{instead} groups the rows of a step by length, or packs them"
            " if possible"
        )
    if settings.sample_order != "seqlen":
        return "sample_order=seqlen with a sample_window brings rows of like length into a step"
    if settings.pad_to_multiple_of > 1:
        return "a lower pad_to_multiple_of leaves less"
    return ""


@dataclass
class _EpochCounts:
    """Steps of an epoch without a label, and the tokens of its steps with and without padding."""

    unlabelled: int = 0
    tokens: int = 0
    padded_tokens: float = 0.0


class StepMonitor:
    """Counts steps without labels or with non-finite losses, padding and gradient noise, and drops
    non-finite gradients.

    Args:
        job: job of the run.
        trainer: trainer of the run.
        log: log that receives the counts of each epoch.
        saver: saver that restores the counts from a checkpoint.
        remedy: function that returns how to continue after the run stops.
        full_batch_rows: number of rows that `full_batch_loss` averages over.

    Attributes:
        full_batch_loss: loss over a fixed number of rows, independent of the batch size.
    """

    def __init__(
        self,
        job: Job,
        trainer: Trainer,
        log: TrainingLog,
        saver: Saver,
        *,
        remedy: Callable[[], str],
        full_batch_rows: int,
    ) -> None:
        settings = job.settings
        self._job = job
        self._settings = settings
        self._log = log
        nonfinite = NonfiniteSteps(
            settings.on_nonfinite_loss,
            trainer.engine,
            event=log.event,
            is_taken=settings.optimizer_in_bwd,
            remedy=remedy,
        )
        self._nonfinite = saver.add("nonfinite", nonfinite)
        self.full_batch_loss = saver.add("full_batch_loss", FullBatchLoss(full_batch_rows))
        self._noise_scale = saver.add("noise_scale", NoiseScale())
        self._epoch = _EpochCounts()
        saver.add("epoch", self)

    def measures_noise(self, step: PlannedRows) -> bool:
        """Return whether the noise of the gradients is sampled in a step."""
        return self._settings.measures_noise and self._noise_scale.is_due(step.progress.steps)

    def drops(self, step: PlannedRows, result: StepResult, *, lr: float) -> bool:
        """Return whether the gradients of a step are dropped, as they are not finite."""
        return self._nonfinite.drops(result, step.progress, lr=lr)

    def add(self, step: PlannedRows, result: StepResult) -> dict[str, float | None]:
        """Count a step; return what progress keeps of it, by name."""
        num_rows = len(step.numbers)
        assert result.rows == num_rows, f"a step of {num_rows} rows trained {result.rows} of them"
        self._epoch.unlabelled += not result.micro_batches
        self._epoch.tokens += result.tokens
        if result.padding_fraction < 1:
            self._epoch.padded_tokens += result.tokens / (1 - result.padding_fraction)
        if not self._settings.measures_noise:
            return {}
        if result.noise is not None:
            self._noise_scale.update(result.noise)
        elif result.micro_batches == 1 and self._log.is_new("one micro-batch"):
            message = (
                f"step {step.progress.steps + 1} is one micro-batch, which shows no gradient noise:"
                " such steps do not count; a smaller micro_batch_size divides them"
            )
            self._log.event("noise_not_measured", message, step=step.progress.steps + 1)
        return {"noise_scale": self._noise_scale.value}

    def end_epoch(self, batches: Batches) -> None:
        """Log the counts of the epoch, and begin to count the next one.

        Raises:
            NonfiniteLossError: no step of the epoch was finite, and all were skipped.
            SettingError: no step of the epoch had a label.
        """
        progress = batches.progress
        num_steps = progress.epoch_steps
        if num_steps and self._epoch.unlabelled == num_steps:
            remedy = "no row of a whole epoch has a label; see its train_on_input and masks"
            raise SettingError("dataset", str(self._job.cfg.dataset), remedy)
        num_nonfinite = self._nonfinite.count()
        self._log_epoch(batches, num_nonfinite)
        self._epoch = _EpochCounts()
        skips = self._settings.on_nonfinite_loss == "skip"
        if skips and num_nonfinite == num_steps > 0:
            raise NonfiniteLossError(
                f"epoch {progress.epoch}: the loss or the gradients of all {num_nonfinite} steps"
                " are not finite, so nothing was trained; check the weights that it began with,"
                " the data and dtype"
            )

    def _log_epoch(self, batches: Batches, num_nonfinite: int) -> None:
        """Log the rows of an epoch that were trained and left out, and how many steps had no label
        or no finite loss.
        """
        event = self._log.event
        of_steps = f"of {count(batches.progress.epoch_steps, 'step')}"
        if self._epoch.unlabelled:
            message = (
                f"{self._epoch.unlabelled} {of_steps} had no label at all, and changed nothing"
            )
            event("no_labels", message, steps=self._epoch.unlabelled)
        if num_nonfinite:
            end = ", and were skipped" if self._settings.on_nonfinite_loss == "skip" else ""
            message = f"{num_nonfinite} {of_steps} had a loss or gradients that are not finite{end}"
            event("nonfinite_steps", message, steps=num_nonfinite)
        message, facts = batches.describe_epoch()
        event("epoch", f"{message}{self._padding_of_epoch()}", **facts)

    def _padding_of_epoch(self) -> str:
        """Describe a large share of padding and the key that reduces it; empty for a small
        share.
        """
        share = 0.0
        if self._epoch.padded_tokens:
            share = 1 - self._epoch.tokens / self._epoch.padded_tokens
        key = keys_against_padding(self._settings)
        if share <= _MUCH_PADDING or not key:
            return ""
        padding = f"; {share:.0%} of the processed tokens were padding"
        if not self._log.is_new(key):
            return padding
        return f"{padding}: {key}"

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain numbers."""
        return asdict(self._epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume counting from a saved state."""
        self._epoch = _EpochCounts(**state)


class RunProfiler:
    """The profiler of a run, which does nothing unless it is enabled.

    Args:
        cfg: block ``profiler`` of the configuration; None for none.
        device: device of the run.

    Raises:
        SettingError: it is another one than torchtune's, or nothing can be profiled here.
    """

    def __init__(self, cfg: DictConfig | None, device: torch.device) -> None:
        # Null is as good as absent.
        given = {key: value for key, value in (cfg or {}).items() if value is not None}
        block = OmegaConf.create(given or {"enabled": False})
        if block.get("_component_", _PROFILER) != _PROFILER:
            remedy = f"only {_PROFILER} works"
            raise SettingError("profiler._component_", block._component_, remedy)
        block["_component_"] = _PROFILER
        self._profiler, self._cfg = instantiate(training.PROFILER_KEY, block)
        if self._cfg["enabled"]:
            available = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
            if not available.intersection(self._profiler.activities):
                remedy = "nothing else can be profiled here; set it to True, or enabled to False"
                raise SettingError("profiler.cpu", block.get("cpu"), remedy)
        profiles_memory = self._cfg["enabled"] and self._cfg.get("profile_memory", False)
        self._records_memory = (
            profiles_memory and device.type == "cuda" and distributed.is_rank_zero()
        )

    def start(self) -> None:
        """Start as training begins."""
        self._profiler.start()

    def begin_step(self, progress: Progress) -> None:
        """Record the CUDA allocator's history while the profiler is active in the first epoch, as
        torchtune does.
        """
        if not self._records_memory or progress.epoch:
            return
        step = progress.epoch_steps
        begin = self._cfg["wait_steps"] + self._cfg["warmup_steps"]
        if step == begin:
            torch.cuda.memory._record_memory_history()
        elif step == begin + self._cfg["active_steps"] + 1:
            torch.cuda.memory._record_memory_history(enabled=None)

    def end_step(self) -> None:
        """Tell the profiler that a step has ended."""
        self._profiler.step()

    def stop(self) -> None:
        """Stop as training ends."""
        self._profiler.stop()

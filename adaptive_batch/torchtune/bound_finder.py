"""The search for the largest batch that a run allows, in training and in validation."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from adaptive_batch import distributed
from adaptive_batch._util import count, fingerprint, format_bytes, installed_version
from adaptive_batch.data import EpochPlanner, longest_rows
from adaptive_batch.distributed import Watchdog
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import MemoryCurve, RandomState, budget_bytes
from adaptive_batch.probe import CachedCurve, ProbeResult, load_latest, load_result, save_result
from adaptive_batch.schedules import Progress
from adaptive_batch.training import (
    BoundSearch,
    Choices,
    Evaluation,
    ProbeOptions,
    WorstRows,
    find_in_step,
)

from .config_errors import as_dict
from .data import Data
from .fake_run import expected_curve
from .job import Job
from .lost_run import TRIALS, LostRun
from .sources import sources_of
from .trainer import Trainer

log = logging.getLogger("adaptive_batch")

# What a trial's memory depends on, of the configuration. A cached bound is found by a fingerprint
# of it.
_MEMORY_KEYS = [
    "model",
    "optimizer",
    "loss",
    "collate_fn",
    "dtype",
    "compile",
    "clip_grad_norm",
    "optimizer_in_bwd",
    "pad_to_multiple_of",
    "fused_rms_norm",
    "enable_activation_checkpointing",
    "enable_activation_offloading",
    "ac_mode",
    "ac_option",
    "custom_sharded_layers",
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "sync_gradients_every_micro_batch",
    "tensor_parallel_dim",
    "tensor_parallel_plan",
]

# Numbers of an optimizer by which its memory depends on whether they are zero: momentum has a
# buffer, weight decay may have one.
_RATES = ("lr", "weight_decay", "betas", "eps", "momentum", "dampening", "alpha", "rho", "lr_decay")

_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_PACKAGES = ("torch", "torchtune", "torchao", "bitsandbytes", "adaptive-batch")


class BoundFinder:
    """Runs trials of what training will run, on the data and the model of a run.

    Use :meth:`check` before the weights are loaded and the others after.

    Args:
        job: job of the run.
        data: rows of the run.
        lost: record of an earlier attempt of the run; of a trial that ended all ranks without
            showing whether its rows fit, up to half are tried. None for none.
        watch: watchdog of this rank, of several; it keeps the time of trials.

    Attributes:
        path: file ``probe.json``, whose results are taken after one trial where they depend on the
            same things.
    """

    def __init__(
        self, job: Job, data: Data, *, lost: LostRun | None = None, watch: Watchdog | None = None
    ) -> None:
        self._job = job
        self._data = data
        self.settings = job.settings
        self._trials: dict[int | str, WorstRows] = {}
        self.path = Path(job.cfg.output_dir) / "adaptive_batch" / "probe.json"
        self._watch = watch
        self._half_of_lost: dict[str, int | None] = {}
        if lost:
            self._half_of_lost = {key: _half(lost.trial_rows(key)) for key in TRIALS}

    def check(self) -> None:
        """Choose the rows of trials; refuse settings that the model or the data do not allow.

        Raises:
            SettingError: a probed length is beyond the model's, the memory allowed is below what
                its weights need, a configured batch is above what can be tried, or the device does
                not measure what it uses.
        """
        settings = self.settings
        self._check_configured_batch()
        self._choose_rows()
        if settings.validation and settings.validation.fits_itself:
            # Lengths are read now, so that a row that the model does not take is refused now.
            _ = self._data.dataset_val.lengths
        self._check_weights_fit()

    def _check_configured_batch(self) -> None:
        """Refuse a batch to grow from that is above what can be tried."""
        settings = self.settings
        grows_from_configured = (
            settings.batch_increase_function is not None and not settings.use_maximum_batch_size
        )
        splits = settings.micro_batch_size is not None or settings.micro_batch_tokens is not None
        largest_batch = self.most_rows
        if grows_from_configured and not splits and settings.batch_size > largest_batch:
            remedy = (
                f"{largest_batch} rows are tried at most, as probe.maximum and the rows of an epoch"
                f" allow; give {largest_batch} or less"
            )
            raise SettingError("batch_size", settings.batch_size, remedy)

    def _choose_rows(self) -> None:
        """Choose the rows of each probed length; refuse those that the model does not take."""
        probe = self.settings.probe
        longest = self._job.max_seq_len or sys.maxsize
        for length in dict.fromkeys((probe.sequence_length, *probe.sequence_lengths)):
            key = "probe.sequence_lengths"
            if length == probe.sequence_length:
                key = "probe.sequence_length"
            if isinstance(length, int) and length > longest:
                raise SettingError(
                    key, length, f"the model takes {count(longest, 'token')} at most"
                )
            rows = self.rows_of(length)
            self._trials[length] = rows
            if rows.length > longest:
                remedy = (
                    f"rows have up to {count(rows.length, 'token')}, and the model takes {longest}"
                    f" at most; set tokenizer.max_seq_len={longest} or less"
                )
                raise SettingError(key, length, remedy)

    def _check_weights_fit(self) -> None:
        """Refuse an allowance of memory that does not hold the model's weights."""
        job = self._job
        probe = self.settings.probe
        ranks = distributed.world_size()
        memory = job.memory
        memory.check_it_can_be_measured()
        budget = budget_bytes(
            probe.device_memory,
            headroom=probe.headroom,
            total_bytes=memory.total_bytes(),
            available_bytes=memory.available_bytes(()),
        )
        weights = sum(p.numel() * p.element_size() for p in job.skeleton.parameters()) // ranks
        # Offloaded weights lie on the host, and only several ranks offload them.
        on_host = ranks > 1 and bool(job.cfg.get("fsdp_cpu_offload", False))
        if weights > budget and not on_host:
            of_each = " of each rank" if ranks > 1 else ""
            remedy = (
                f"the model's weights alone need {format_bytes(weights)}{of_each}, and"
                f" {format_bytes(budget)} may be used; allow more memory or take a smaller model"
            )
            raise SettingError("probe.device_memory", probe.device_memory, remedy)

    @property
    def most_rows(self) -> int:
        """Largest number of rows that is of use at once.

        It is bounded by the rows of a step or an epoch, and by ``probe.maximum``.
        """
        settings = self.settings
        epoch_rows = max(1, len(self._data.dataset) // self._job.ranks)
        if self._fits_whole_step:
            usable_rows = min(epoch_rows, settings.step_rows)
        elif settings.batch_tokens:
            usable_rows = epoch_rows
        else:
            usable_rows = max(1, epoch_rows // settings.gradient_accumulation_steps)
        # A trial that ended all ranks would end them again, so fewer rows are tried.
        safe_rows = self._half_of_lost.get("trial_rows") or usable_rows
        return max(1, min(settings.probe.maximum, usable_rows, safe_rows))

    @property
    def _fits_whole_step(self) -> bool:
        """Whether a step fits itself and is always the same."""
        settings = self.settings
        return settings.fits_itself and not (
            settings.batch_changes or settings.grows or settings.batch_tokens
        )

    def of_training(
        self,
        trainer: Trainer,
        *,
        length: int | str,
        batch_size: int,
        keeps_batch: bool = False,
        choices: Choices | None = None,
    ) -> list[ProbeResult]:
        """Find the largest number of rows whose forward and backward fit in training.

        All that is resident in training is there in the trials, too.

        Args:
            trainer: trainer of the run.
            length: ``longest``, ``max_seq_len`` or a number of tokens.
            batch_size: rows that training begins with, unless they are to be found.
            keeps_batch: flag that `batch_size` is a checkpoint's, and is kept whatever fits.
            choices: choices of the fastest micro-batches, see :meth:`choices`; None for as much at
                once as fits.

        Returns:
            The search that counts, last. Where a step fits itself, one micro-batch is tried first;
            if it has to be several, another search follows, as gradients are then there when a
            forward begins.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: a step does not fit, and with the optimizer in backward it cannot be
                split.
        """
        settings = self.settings
        step_rows = batch_size * settings.gradient_accumulation_steps
        several = self.has_several or (
            settings.gradient_accumulation_steps > 1 and not self._fits_whole_step
        )
        rows = self._trials.get(length) or self.rows_of(length)

        def find(accumulates: bool) -> ProbeResult:
            is_first = accumulates == several
            return self._find(
                trainer,
                rows,
                maximum=self.most_rows,
                accumulates=accumulates,
                rounds=settings.probe.round_to_power_of_two and settings.use_maximum_batch_size,
                keeps_result=True,
                choices=choices if is_first else None,
            )

        # A batch that is still to be found is never above what fits, so it needs no second search.
        is_kept = keeps_batch or self._fits_whole_step
        return find_in_step(
            find,
            accumulates=several,
            step_rows=step_rows if is_kept else None,
            before_splitting=partial(self._check_it_splits, step_rows, keeps_batch),
        )

    def _check_it_splits(self, step_rows: int, keeps_batch: bool, first: ProbeResult) -> None:
        """Refuse a step that does not fit where the optimizer runs in the backward."""
        if not self.settings.optimizer_in_bwd:
            return
        whose = "the checkpoint's batch_size" if keeps_batch else "batch_size"
        raise SettingError(
            "optimizer_in_bwd",
            True,
            f"{whose} {step_rows} is above the {first.max_batch_size} rows that fit here, and"
            " cannot be split into micro-batches; take a smaller one or more memory, or start"
            " again with optimizer_in_bwd=False",
        )

    def choices(self, trainer: Trainer) -> Choices | None:
        """Return the choices of the fastest micro-batches; None for as much at once as fits."""
        settings = self.settings
        cfg = self._job.cfg
        data = self._data
        # A compiled model is compiled again for shapes that it has not seen, and a few trials do
        # not show that time.
        if not settings.chooses_fastest or cfg.compile:
            return None
        if settings.micro_batch_layout is not None:
            layouts = [settings.micro_batch_layout]
        elif settings.uniform_micro_batches:
            layouts = ["padded"]
        else:
            layouts = ["grouped"]
            reason = data.why_unpacked or trainer.runner.why_not_packed(data.longest(2))
            if reason:
                log.info("rows are not packed: %s", reason)
            else:
                layouts.append("packed")
        rows = settings.step_rows
        if settings.batch_tokens:
            rows = max(1, int(settings.batch_tokens / data.dataset.lengths.double().mean()))
        # A step that changes its size may have as many rows as fit, which 0 stands for.
        if settings.batch_changes or settings.grows:
            rows = 0
        unit = "rows" if settings.micro_batch_size else "tokens"
        return Choices(tuple(layouts), unit, rows, settings.probe.objective)

    @property
    def has_several(self) -> bool:
        """Whether some step has several micro-batches whatever fits.

        Accumulation as configured is not counted.
        """
        settings = self.settings
        has_own_number = isinstance(settings.micro_batch_size or settings.micro_batch_tokens, int)
        # Ranks that share one copy of the model each run more rows than batch_size.
        holds_more = self._job.ranks > distributed.data_parallel_size()
        grows_beyond = settings.grows and settings.grow_beyond_maximum
        cuts = settings.chooses_fastest or settings.micro_batch_layout == "grouped"
        # The noise scale is measured on a sampled part of the step, which is cut off the rest.
        cuts |= settings.measures_noise and settings.micro_batch_tokens is not None
        return has_own_number or bool(settings.batch_tokens) or grows_beyond or holds_more or cuts

    def known(self) -> tuple[int, int, str]:
        """Return what fits without a trial: rows (0 where unknown), tokens of each, the source."""
        probe = self.settings.probe
        worst = self._trials.get(probe.sequence_length) or self.rows_of(probe.sequence_length)
        tokens = worst.length
        if probe.assumed_maximum is not None:
            rows = min(probe.assumed_maximum, self.most_rows)
            return rows, tokens, "probe.assumed_maximum says so"
        result = load_latest(self.path, settings=settings_name(self._job, self._data, tokens))
        if result is None:
            remedy = "plan with one by probe.assumed_maximum=N"
            return 0, tokens, f"{self.path} has no search of these settings; {remedy}"
        rows = min(result.max_batch_size, self.most_rows)
        return rows, tokens, f"a search found that before ({self.path})"

    def of_row(
        self, trainer: Trainer, row: dict[str, Any], *, maximum: int, accumulates: bool
    ) -> ProbeResult:
        """Find how many rows like one fit that is longer than any tried, up to a maximum.

        Raises:
            DoesNotFitError: not one does.
        """
        length = len(row["tokens"])
        rows = WorstRows(lambda size: [row] * size, length, f"one row of {count(length, 'token')}")
        return self._find(trainer, rows, maximum=maximum, accumulates=accumulates)

    def of_validation(self, trainer: Trainer) -> ProbeResult:
        """Find the largest number of the longest rows of validation that fit, without gradients.

        Raises:
            DoesNotFitError: one row does not fit.
        """
        data = self._data
        order = longest_rows(data.dataset_val.lengths, len(data.dataset_val.lengths))
        tokens = int(data.dataset_val.lengths[order[0]])
        made: list[dict[str, Any]] = []

        def rows(size: int) -> list[dict[str, Any]]:
            made.extend(data.dataset_val[row] for row in order[len(made) : size])
            return made[:size]

        usable_rows = min(len(order), self.settings.probe.maximum)
        safe_rows = self._half_of_lost.get("trial_rows_val") or usable_rows
        name = f"one row of {count(tokens, 'token')} of dataset_val, even without gradients,"
        return self._find(
            trainer,
            WorstRows(rows, tokens, name),
            maximum=min(usable_rows, safe_rows),
            accumulates=False,
            evaluates=True,
        )

    def _find(
        self,
        trainer: Trainer,
        rows: WorstRows,
        *,
        maximum: int,
        accumulates: bool,
        rounds: bool = False,
        evaluates: bool = False,
        keeps_result: bool = False,
        choices: Choices | None = None,
    ) -> ProbeResult:
        probe = self.settings.probe
        options = ProbeOptions(
            probe.device_memory,
            probe.headroom,
            distributed.minimum(maximum),
            probe.search,
            round_to_power_of_two=rounds,
            memory_key="probe.device_memory",
        )
        shapes = self._shapes_of(rows)
        described_choices = asdict(choices) if choices else None
        conditions = [options.maximum, accumulates, rounds, shapes, described_choices]
        curve_name = self._curve_name(rows.length, shapes, accumulates, evaluates)
        cache = _Cache(
            self._job,
            self._data,
            rows,
            conditions,
            CachedCurve(curve_name, on=probe.cache),
            estimates=not evaluates,
            path=self.path if keeps_result else None,
        )
        evaluation = None
        if evaluates:
            evaluation = Evaluation(
                partial(self._evaluate, trainer, rows), self._trials[probe.sequence_length]
            )
        search = BoundSearch(
            trainer.tried(),
            rows,
            options,
            accumulates=accumulates,
            evaluation=evaluation,
            cache=cache,
            choices=choices,
            time_limit=self.limit,
        )
        result = search.run()
        cache.learn(result)
        return result

    def _evaluate(self, trainer: Trainer, rows: WorstRows, tried: list[Any]) -> object:
        data = self._data
        runner = trainer.runner
        length = data.shapes_val.padded(rows.length)
        return runner.evaluate(tried, loss=data.loss_val(runner.loss), length=length, is_trial=True)

    def _curve_name(self, tokens: int, shapes: Any, accumulates: bool, evaluates: bool) -> str:
        """Return a name for everything that a peak depends on, whatever may be used."""
        configured = as_dict(self._job.cfg)
        device = self._job.device
        # Both decide whether gradients are kept for the noise scale.
        noise_keys = {
            key: configured.get(key) for key in ("log_gradient_noise_scale", "batch_size_schedule")
        }
        sources = sources_of({**memory_keys(configured), **noise_keys})
        # Another device has other kernels, which need another workspace.
        kernels = []
        if device.type == "cuda":
            kernels = [
                torch.cuda.get_device_name(device),
                *torch.cuda.get_device_capability(device),
            ]
        return fingerprint(
            _conditions(self._job, self._data, tokens),
            noise_keys,
            sources,
            kernels,
            accumulates,
            evaluates,
            shapes,
        )

    def _shapes_of(self, rows: WorstRows) -> Any:
        # Reading a row of some datasets draws random numbers, which training must not miss.
        random_state = RandomState(self._job.device)
        shapes = _shapes(self._data.collate(rows.first(1)))
        random_state.restore()
        return shapes

    def limit(self, doing: str) -> AbstractContextManager[object]:
        """Return a context that ends all ranks where one does not end its trial in time."""
        seconds = self.settings.probe.trial_timeout
        if self._watch is None:
            return nullcontext()
        return self._watch.limit(seconds, doing)

    def rows_of(self, length: int | str) -> WorstRows:
        """Return the rows of trials of a length."""
        lengths = self._data.dataset.lengths
        order = longest_rows(lengths, len(lengths))
        longest = int(lengths[order[0]])
        if length == "max_seq_len":
            limit = getattr(self._data.tokenizer, "max_seq_len", None)
            if limit is None:
                raise SettingError(
                    "probe.sequence_length",
                    length,
                    "the tokenizer has no max_seq_len; set it, or give a number",
                )
            length = int(limit)
        target = longest if length == "longest" else int(length)
        made: list[dict[str, Any]] = []

        def rows(count: int) -> list[dict[str, Any]]:
            while len(made) < count:
                row = self._data.dataset[order[len(made)]]
                made.append(row if length == "longest" else _resized(row, target))
            return made[:count]

        # The order of an epoch is made only where a search asks for it, and once.
        cached_order = cache(partial(self.order, target))

        def in_order(begin: int, number: int) -> list[dict[str, Any]]:
            numbers = cached_order()
            if not numbers:
                return rows(number)
            places = [place % len(numbers) for place in range(begin, begin + number)]
            return [self._data.dataset[numbers[place]] for place in places]

        return WorstRows(rows, target, f"one row of {count(target, 'token')}", in_order)

    def order(self, longest: int) -> list[int]:
        """Return the numbers of rows of up to so many tokens, about in the first epoch's order."""
        data = self._data
        # A schedule changes the order little, and may need a rate, which is not there yet.
        batching = replace(data.batching(), batch_size_schedule=None)
        divisible = data.shapes.uniform in ("rows", "both")
        epochs = EpochPlanner(
            data.dataset, batching, ranks=distributed.data_parallel_size(), divisible=divisible
        )
        order = epochs.order(Progress())[:]
        numbers: list[int] = order[data.dataset.lengths[order] <= longest].tolist()
        return numbers


class _Cache:
    """Results of earlier searches of the same trials.

    Bounds lie in ``probe.json``, peaks in a curve.

    Args:
        job: job of the run.
        data: rows of the run.
        rows: rows of the trials.
        conditions: values that the result depends on beside the settings.
        curve: curve of the peaks of these trials.
        estimates: flag that lets a curve be estimated that is not known.
        path: file of the results; None keeps none.
    """

    def __init__(
        self,
        job: Job,
        data: Data,
        rows: WorstRows,
        conditions: list[Any],
        curve: CachedCurve,
        *,
        estimates: bool,
        path: Path | None,
    ) -> None:
        self._job = job
        self._rows = rows
        self._conditions = conditions
        self._curve = curve
        self._estimates = estimates
        self._path = path if job.settings.probe.cache else None
        self._writes = path
        self._settings = settings_name(job, data, rows.length)

    def known(self, budget: int) -> ProbeResult | None:
        """Return the result of a search within about the same budget, in bytes; None for none."""
        if self._path is None:
            return None
        return load_result(self._path, fingerprint=self._name(budget))

    def expected(self) -> MemoryCurve | None:
        """Return the curve of earlier trials, or else the estimate of it."""
        curve = self._curve.read()
        if curve is None:
            curve = self._estimate()
            if curve is not None:
                self._curve.write(curve)
        return curve

    def learn(self, result: ProbeResult) -> None:
        """Keep what a search has found, unless it was known."""
        if result.from_cache:
            return
        self._curve.learn(result.trials)
        if self._writes and distributed.is_rank_zero():
            save_result(
                result,
                self._writes,
                fingerprint=self._name(result.budget_bytes),
                settings=self._settings,
            )

    def _name(self, budget: int) -> str:
        allocator = [self._job.memory.describe(), *map(os.environ.get, _ALLOCATOR_SETTINGS)]
        # What is available moves a little from run to run; a bound is worth the same within a
        # hundredth of it.
        about = round(math.log(max(1, budget), 1.01))
        return fingerprint(self._settings, allocator, *self._conditions, about)

    def _estimate(self) -> MemoryCurve | None:
        """Return the estimated curve of peaks; None where two trials tell, or where it fails."""
        job = self._job
        probe = self._job.settings.probe
        # Memory that is counted to the byte lies on a line, which two trials show.
        is_counted = job.memory.granularity_bytes == 1
        if is_counted or not self._estimates or distributed.world_size() > 1:
            return None
        if probe.search != "predict" or not probe.cache:
            return None
        start = time.perf_counter()
        accumulates = self._conditions[1]
        try:
            curve = expected_curve(
                job.cfg,
                job.settings,
                self._rows.first,
                accumulates=accumulates,
                builder=job.builder,
            )
        except Exception as error:
            # The estimate only shortens the search, so no failure of it may end the run.
            log.info(
                "searching without an estimate, which could not be made: %s: %s",
                type(error).__name__,
                error,
            )
            return None
        log.info(
            "estimated on fake tensors in %.1f s what trials should peak at",
            time.perf_counter() - start,
        )
        return curve


def settings_name(job: Job, data: Data, tokens: int = 0) -> str:
    """Return a name for the settings that a bound depends on, for rows of so many tokens."""
    probe = job.settings.probe
    return fingerprint(
        _conditions(job, data, tokens), probe.search, probe.device_memory, probe.headroom
    )


def _conditions(job: Job, data: Data, tokens: int) -> list[Any]:
    """Return the configured values that a trial's memory depends on."""
    ranks = [distributed.data_parallel_size(), distributed.world_size()]
    return [
        memory_keys(as_dict(job.cfg)),
        {name: installed_version(name) for name in _PACKAGES},
        f"{type(job.builder).__module__}.{type(job.builder).__qualname__}",
        [tokens, data.packed, str(job.cfg.device), *ranks],
    ]


def left_by_rounding(bound: int, batch_size: int) -> str:
    """Return how many rows the power of two leaves unused, and the remedy; empty for none."""
    if batch_size == bound:
        return ""
    unused = (
        f"the power of two leaves {bound - batch_size} of the {bound} rows that fit unused"
        f" ({1 - batch_size / bound:.0%})"
    )
    return f"{unused}; probe.round_to_power_of_two=False trains with all of them"


def memory_keys(configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration as far as memory depends on it.

    A sweep of learning rates is one to a cached bound.
    """
    keys = {key: configured.get(key) for key in _MEMORY_KEYS}
    keys["clip_grad_norm"] = keys["clip_grad_norm"] is not None
    optimizer = dict(configured["optimizer"])
    for key in _RATES:
        if key in optimizer:
            optimizer[key] = _are_zero(optimizer[key])
    keys["optimizer"] = optimizer
    return keys


def _are_zero(value: Any) -> Any:
    """Return whether each number is zero; return anything else as it is."""
    if isinstance(value, list):
        return [_are_zero(part) for part in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return value == 0


def _half(rows: int | None) -> int | None:
    if not rows:
        return rows
    return max(1, rows // 2)


def _resized(row: dict[str, Any], length: int) -> dict[str, Any]:
    """Return a row of text cut or repeated to so many tokens."""
    # A picture of a row can be neither cut nor repeated with its text.
    extra_fields = sorted(set(row) - {"tokens", "labels", "mask"})
    if extra_fields:
        raise SettingError(
            "probe.sequence_length",
            length,
            f"rows with {', '.join(extra_fields)} have a length of their own; use longest",
        )
    return {key: (list(value) * (length // len(value) + 1))[:length] for key, value in row.items()}


def _shapes(batch: Any) -> Any:
    """Return shape and dtype of each tensor in a batch, nested as they are."""
    if isinstance(batch, torch.Tensor):
        return [list(batch.shape), str(batch.dtype)]
    if isinstance(batch, Mapping):
        return {str(key): _shapes(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_shapes(value) for value in batch]
    return type(batch).__name__

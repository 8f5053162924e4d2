"""The search for the largest batch that a run allows, in training and in validation."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adaptive_batch import distributed
from adaptive_batch._util import file_signature, fingerprint
from adaptive_batch.data import longest_rows
from adaptive_batch.distributed import Watchdog
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import GIB, DeviceMemory, MemoryCurve, budget_bytes, device_memory
from adaptive_batch.probe import CachedCurve, ProbeResult, Search, load_latest, load_result, save_result
from adaptive_batch.training import MaxBatchSearch, WorstRows

from .config_errors import as_dict
from .data import Data
from .doctor import installed_version
from .fake_run import expected_curve
from .job import Job
from .model import ModelBuilder
from .trainer import Trainer

log = logging.getLogger("adaptive_batch")

# What a trial's memory depends on, of the configuration; the fingerprint of a cached bound is made of it.
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

_PACKAGES = ("torch", "torchtune", "torchao", "bitsandbytes", "adaptive-batch")


class BatchSizeFinder:
    """Runs trials of what training will run, on the data and the model of a run.

    Use :meth:`check` before the weights are loaded and the others after.

    Args:
        job, data: of the run.

    Attributes:
        watch: over this rank, of several; keeps the time of trials.
        indeterminate: rows of a trial that ended all ranks before, without saying whether they fit; up to half of them are tried.
            None for none.
        indeterminate_val: the same of a trial of validation.
    """

    def __init__(self, job: Job, data: Data) -> None:
        self._job, self._data = job, data
        self.settings = job.settings
        self._trials: dict[int | str, WorstRows] = {}
        self.watch: Watchdog | None = None
        self.indeterminate: int | None = None
        self.indeterminate_val: int | None = None

    def check(self) -> None:
        """Choose the rows of trials, and refuse what the model's size or length, or the rows of an epoch, do not allow.

        Raises:
            SettingError: a probed length is beyond the model's, the memory allowed is below what its weights need, a
                configured batch is above what can be tried, or the device does not say what it uses.
        """
        job, data, settings, probe = self._job, self._data, self.settings, self.settings.probe
        grows_from_configured = settings.batch_increase_function is not None and not settings.use_maximum_batch_size
        most = self.most_rows
        splits = settings.micro_batch_size is not None or settings.micro_batch_tokens is not None
        if grows_from_configured and not splits and settings.batch_size > most:
            raise SettingError("batch_size", settings.batch_size, f"{self._why_most()}; give {most} or less")
        longest = job.max_seq_len
        for length in dict.fromkeys((probe.sequence_length, *probe.sequence_lengths)):
            key = "probe.sequence_length" if length == probe.sequence_length else "probe.sequence_lengths"
            if longest and isinstance(length, int) and length > longest:
                raise SettingError(key, length, f"the model takes {longest} tokens at most")
            self._trials[length] = rows = self.rows_of(length)
            tokens = rows.length
            if longest and tokens > longest:
                remedy = f"rows have up to {tokens} tokens, and the model takes {longest} at most"
                raise SettingError(key, length, f"{remedy}; set tokenizer.max_seq_len={longest} or less")
        if longest and settings.validation and settings.validation.fits_itself:
            tokens = int(data.lengths_val.max())
            if tokens > longest:
                remedy = f"rows have up to {tokens} tokens, and the model takes {longest} at most"
                raise SettingError("batch_size_val", "auto", f"{remedy}; set tokenizer.max_seq_len={longest} or less")
        memory = self._memory()
        memory.check_it_can_be_measured()
        budget = budget_bytes(
            probe.device_memory,
            headroom=probe.headroom,
            total_bytes=memory.total_bytes(),
            available_bytes=memory.available_bytes(()),
        )
        weights = sum(p.numel() * p.element_size() for p in job.skeleton.parameters()) // distributed.world_size()
        of_each = " of each rank" if distributed.world_size() > 1 else ""
        on_host = distributed.world_size() > 1 and bool(job.cfg.get("fsdp_cpu_offload", False))
        if weights > budget and not on_host:
            raise SettingError(
                "probe.device_memory",
                probe.device_memory,
                f"the model's weights alone need {weights / GIB:.2f} GiB{of_each}, and {budget / GIB:.2f} GiB may be used; "
                "allow more memory or take a smaller model",
            )

    @property
    def most_rows(self) -> int:
        """The most rows that are of use at once: what a step or an epoch has of them, and ``probe.maximum``."""
        settings, ranks = self.settings, self._job.ranks
        rows = max(1, len(self._data.dataset) // ranks)
        if settings.fits_itself and not (settings.batch_changes or settings.grows or settings.batch_tokens):
            of_use = min(rows, settings.step_rows)
        else:
            of_use = rows if settings.batch_tokens else max(1, rows // settings.gradient_accumulation_steps)
        return max(1, min(settings.probe.maximum, of_use, _half(self.indeterminate) or of_use))

    def _why_most(self) -> str:
        if self.most_rows == self.settings.probe.maximum:
            return f"probe.maximum is {self.settings.probe.maximum}"
        accumulated = self.settings.gradient_accumulation_steps
        ranks = f" for {self._job.ranks} ranks" if self._job.ranks > 1 else ""
        rows = f"an epoch has {len(self._data.dataset)} rows{ranks}"
        return f"{rows} for {accumulated} micro-batches" if accumulated > 1 else rows

    def of_training(
        self, trainer: Trainer, *, length: int | str, batch_size: int, path: Path, goes_on: bool = False
    ) -> list[ProbeResult]:
        """Find the largest number of rows whose forward and backward fit, with all that is resident in training.

        Args:
            trainer: of the run.
            length: ``longest``, ``max_seq_len`` or a number of tokens.
            batch_size: that training begins with, unless it is to be found.
            path: the file of the result, which is believed after one trial if it depends on the same things.
            goes_on: `batch_size` is a checkpoint's, and is kept whatever fits.

        Returns:
            The search that counts, last. Where a step fits itself, one micro-batch is tried first; if it has to be several,
            another search follows, as gradients are then there beside a forward.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: a step does not fit, and with the optimizer in backward it cannot be split.
        """
        settings = self.settings
        rows = self._trials.get(length) or self.rows_of(length)

        def search(*, accumulates: bool) -> ProbeResult:
            rounds = settings.probe.round_to_power_of_two and settings.use_maximum_batch_size
            return self._find(trainer, rows, maximum=self.most_rows, accumulates=accumulates, rounds=rounds, path=path)

        step_rows = batch_size * settings.gradient_accumulation_steps
        may_be_another = settings.batch_changes or settings.grows or bool(settings.batch_tokens)
        tries_whole_step = settings.fits_itself and not may_be_another
        several = self.has_several or (settings.gradient_accumulation_steps > 1 and not tries_whole_step)
        first = search(accumulates=several)
        if several or step_rows <= first.max_batch_size or not (goes_on or tries_whole_step):
            return [first]
        if settings.optimizer_in_bwd:
            whose = "the checkpoint's batch_size" if goes_on else "batch_size"
            raise SettingError(
                "optimizer_in_bwd",
                True,
                f"{whose} {step_rows} is above the {first.max_batch_size} rows that fit here, and cannot be split into "
                "micro-batches; take a smaller one or more memory, or start anew with optimizer_in_bwd=False",
            )
        return [first, search(accumulates=True)]

    @property
    def has_several(self) -> bool:
        """Whether some step has several micro-batches whatever fits, accumulation as configured apart."""
        settings = self.settings
        has_own_number = isinstance(settings.micro_batch_size or settings.micro_batch_tokens, int)
        holds_more = self._job.ranks > distributed.data_parallel_size()  # each rank, than batch_size
        grows_beyond = settings.grows and settings.grow_beyond_maximum
        return has_own_number or bool(settings.batch_tokens) or grows_beyond or holds_more

    def known(self, path: Path) -> tuple[int, int, str]:
        """What fits as far as it is known without trying: rows, the tokens of each, and where that is from; 0 rows for unknown."""
        probe = self.settings.probe
        tokens = (self._trials.get(probe.sequence_length) or self.rows_of(probe.sequence_length)).length
        if probe.assumed_maximum is not None:
            return min(probe.assumed_maximum, self.most_rows), tokens, "probe.assumed_maximum says so"
        found = load_latest(path, settings=self.settings_name(tokens))
        if found is None:
            return 0, tokens, f"{path} has no search of these settings; plan with one by probe.assumed_maximum=N"
        return min(found.max_batch_size, self.most_rows), tokens, f"a search found that before ({path})"

    def of_row(self, trainer: Trainer, row: dict[str, Any], *, maximum: int, accumulates: bool) -> ProbeResult:
        """The same for one row, repeated: for a row that is longer than any that was tried.

        Raises:
            DoesNotFitError: it does not fit.
        """
        length = len(row["tokens"])
        rows = WorstRows(lambda size: [row] * size, length, f"one row of {length} tokens")
        return self._find(trainer, rows, maximum=maximum, accumulates=accumulates)

    def of_validation(self, trainer: Trainer) -> ProbeResult:
        """Find the largest number of the longest rows of validation that fit, without gradients.

        Raises:
            DoesNotFitError: one row does not fit.
        """
        data = self._data
        lengths = data.lengths_val
        order = longest_rows(lengths, len(lengths))
        tokens = int(lengths[order[0]])
        made: list[dict[str, Any]] = []

        def rows(size: int) -> list[dict[str, Any]]:
            made.extend(data.dataset_val[row] for row in order[len(made) : size])
            return made[:size]

        most = min(len(order), self.settings.probe.maximum)
        maximum = min(most, _half(self.indeterminate_val) or most)
        name = f"one row of {tokens} tokens of dataset_val, even without gradients,"
        return self._find(trainer, WorstRows(rows, tokens, name), maximum=maximum, accumulates=False, evaluates=True)

    def _find(
        self,
        trainer: Trainer,
        rows: WorstRows,
        *,
        maximum: int,
        accumulates: bool,
        rounds: bool = False,
        evaluates: bool = False,
        path: Path | None = None,
    ) -> ProbeResult:
        data, settings, memory = self._data, self.settings, self._memory()
        probe = settings.probe
        search = MaxBatchSearch(
            trainer.model,
            trainer.in_backward or trainer.optimizer,
            trainer.runner,
            memory=memory,
            device_memory=probe.device_memory,
            headroom=probe.headroom,
            search=probe.search,
            keeps_gradients=not settings.sync_gradients_every_micro_batch and distributed.world_size() > 1,
            key="probe.device_memory",
            time_limit=self.limit,
        )
        return search.find(
            rows,
            maximum=maximum,
            accumulates=accumulates,
            round_to_power_of_two=rounds,
            evaluate=(lambda tried: trainer.runner.evaluate(data.collate_val(tried), rehearsing=True))
            if evaluates
            else None,
            trained=self._rows_of_training() if evaluates else None,
            earlier=lambda budget: _EarlierSearches(
                self,
                rows,
                memory,
                path=path,
                fingerprint=self._fingerprint(rows, memory, budget, distributed.minimum(maximum), accumulates, rounds),
                accumulates=accumulates,
                evaluates=evaluates,
            ),
            choose=self._choose,
        )

    # None takes the search that is configured.
    _choose: Callable[..., Search] | None = None

    def _rows_of_training(self) -> WorstRows:
        return self._trials[self.settings.probe.sequence_length]

    def _fingerprint(
        self,
        rows: WorstRows,
        memory: DeviceMemory,
        budget_bytes: int,
        maximum: int,
        accumulates: bool,
        rounds: bool,
    ) -> str:
        """A name for everything that a bound depends on."""
        return fingerprint(
            self.settings_name(rows.length),
            [memory.describe(), os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), os.environ.get("PYTORCH_ALLOC_CONF")],
            [maximum, accumulates, rounds, distributed.data_parallel_size(), distributed.world_size()],
            _shapes(self._data.collate(rows.first(1))),
            # what is available moves a little from run to run; a bound is worth the same within a hundredth of it
            round(math.log(max(1, budget_bytes), 1.01)),
        )

    @property
    def trials_name(self) -> str:
        """A name for what whether a trial fits depends on, as far as it is configured."""
        return self.settings_name(0)

    def settings_name(self, tokens: int) -> str:
        """A name for the part of it that is the same wherever it is run."""
        job, data, probe = self._job, self._data, self.settings.probe
        plain = as_dict(job.cfg)
        return fingerprint(
            {key: plain.get(key) for key in _MEMORY_KEYS},
            {name: installed_version(name) for name in _PACKAGES},
            _kind_of_fine_tuning(job.builder),
            [probe.search, tokens, data.packed, str(job.cfg.device), probe.device_memory, probe.headroom],
            distributed.world_size(),
        )

    def curve_name(self, rows: WorstRows, *, accumulates: bool, evaluates: bool) -> str:
        """A name for everything that a peak depends on, whatever it may be."""
        job, data = self._job, self._data
        plain = as_dict(job.cfg)
        chosen = {key: plain.get(key) for key in (*_MEMORY_KEYS, "log_gradient_noise_scale", "batch_size_schedule")}
        return fingerprint(
            chosen,
            _sources(chosen),
            {name: installed_version(name) for name in _PACKAGES},
            _kind_of_fine_tuning(job.builder),
            [rows.length, data.packed, job.device.type, _kind_of(job.device), accumulates, evaluates],
            [distributed.data_parallel_size(), distributed.world_size(), _shapes(data.collate(rows.first(1)))],
        )

    def estimated_curve(
        self, rows: WorstRows, memory: DeviceMemory, *, accumulates: bool, evaluates: bool
    ) -> MemoryCurve | None:
        """Return what fake tensors show of peaks that are not counted; None where they cannot, and where two trials tell."""
        predicts = self.settings.probe.search == "predict" and self.settings.probe.cache
        if memory.granularity_bytes == 1 or evaluates or distributed.world_size() > 1 or not predicts:
            return None
        start = time.perf_counter()
        try:
            curve = expected_curve(
                self._job.cfg, self.settings, rows.first, accumulates=accumulates, builder=self._job.builder
            )
        except Exception as error:  # it only shortens the search
            log.info("searching without an estimate, which could not be made: %s: %s", type(error).__name__, error)
            return None
        log.info("estimated on fake tensors in %.1f s what trials should peak at", time.perf_counter() - start)
        return curve

    def _memory(self) -> DeviceMemory:
        return device_memory(self._job.device, shared_by=distributed.local_world_size())

    def limit(self, doing: str) -> AbstractContextManager[object]:
        """Within its context all ranks end where one does not come to the end of its trial in time."""
        seconds = self.settings.probe.trial_timeout
        return self.watch.limit(seconds, doing) if self.watch else nullcontext()

    def rows_of(self, length: int | str) -> WorstRows:
        """Return the rows of trials of a length."""
        lengths = self._data.lengths
        order = longest_rows(lengths, len(lengths))
        longest = int(lengths[order[0]])
        if length == "max_seq_len":
            limit = getattr(self._data.tokenizer, "max_seq_len", None)
            if limit is None:
                raise SettingError(
                    "probe.sequence_length", length, "the tokenizer has no max_seq_len; set it, or give a number"
                )
            length = int(limit)
        target = longest if length == "longest" else int(length)
        made: list[dict[str, Any]] = []

        def rows(count: int) -> list[dict[str, Any]]:
            while len(made) < count:
                row = self._data.dataset[order[len(made)]]
                made.append(row if length == "longest" else _resized(row, target))
            return made[:count]

        return WorstRows(rows, target, f"one row of {target} tokens")


class _EarlierSearches:
    """What ``probe.json`` and the cache of curves hold of earlier searches."""

    def __init__(
        self,
        finder: BatchSizeFinder,
        rows: WorstRows,
        memory: DeviceMemory,
        *,
        path: Path | None,
        fingerprint: str,
        accumulates: bool,
        evaluates: bool,
    ) -> None:
        self._finder, self._rows, self._path, self._fingerprint = finder, rows, path, fingerprint
        self._caches = finder.settings.probe.cache
        kinds = {"accumulates": accumulates, "evaluates": evaluates}
        self._estimate = partial(finder.estimated_curve, rows, memory, **kinds)
        self._curve = CachedCurve(finder.curve_name(rows, **kinds), on=self._caches)

    def known_result(self) -> ProbeResult | None:
        if self._path is None or not self._caches:
            return None
        return load_result(self._path, fingerprint=self._fingerprint)

    def known_curve(self) -> MemoryCurve | None:
        curve = self._curve.read()
        if curve is None and (curve := self._estimate()) is not None:
            self._curve.write(curve)
        return curve

    def keep(self, result: ProbeResult) -> None:
        self._curve.learn(result.trials)
        if self._path and distributed.is_rank_zero():
            settings = self._finder.settings_name(self._rows.length)
            save_result(result, self._path, fingerprint=self._fingerprint, settings=settings)


def _half(rows: int | None) -> int | None:
    return rows and max(1, rows // 2)


def _resized(row: dict[str, Any], length: int) -> dict[str, Any]:
    """A row of text cut or repeated to so many tokens."""
    if set(row) - {"tokens", "labels", "mask"}:
        others = ", ".join(sorted(set(row) - {"tokens", "labels", "mask"}))
        raise SettingError(
            "probe.sequence_length", length, f"rows with {others} have a length of their own; use longest"
        )
    return {key: (list(value) * (length // len(value) + 1))[:length] for key, value in row.items()}


def _sources(value: Any) -> list[Any]:
    """The files of the components that are the user's own, whose names alone do not say what they do."""
    if isinstance(value, Mapping):
        return [source for item in value.values() for source in _sources(item)]
    if isinstance(value, list | tuple):
        return [source for item in value for source in _sources(item)]
    if not isinstance(value, str) or value.partition(".")[0] in ("torch", "torchtune", "torchao", "bitsandbytes"):
        return []
    module = sys.modules.get(value.rpartition(".")[0])
    return [value, file_signature(module.__file__)] if module is not None and module.__file__ else []


def _kind_of_fine_tuning(builder: ModelBuilder) -> str:
    return f"{type(builder).__module__}.{type(builder).__qualname__}"


def _kind_of(device: torch.device) -> list[Any]:
    """What decides which kernels a device has."""
    if device.type != "cuda":
        return []
    return [torch.cuda.get_device_name(device), *torch.cuda.get_device_capability(device)]


def _shapes(batch: Any) -> Any:
    """Return shape and dtype of each tensor in a batch, nested as they are."""
    if isinstance(batch, torch.Tensor):
        return [list(batch.shape), str(batch.dtype)]
    if isinstance(batch, Mapping):
        return {str(key): _shapes(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_shapes(value) for value in batch]
    return type(batch).__name__

"""Results of earlier searches, by a fingerprint of everything that a trial's memory depends on."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from adaptive_batch import distributed
from adaptive_batch._util import cache_directory, fingerprint, installed_version
from adaptive_batch.memory import ALLOCATOR_VARIABLES, Line, MemoryCurve, RandomState
from adaptive_batch.probe import ProbeResult, Store, measured_curve, read_result
from adaptive_batch.training import ProbeOptions, SearchScope

from .config_errors import as_dict, component_files
from .data import Data
from .fake_run import expected_curve
from .job import Job

log = logging.getLogger("adaptive_batch")

# What a trial's memory depends on, of the configuration.
_MEMORY_KEYS = [
    "model",
    "optimizer",
    "loss",
    "ref_checkpointer",
    "teacher_model",
    "kd_loss",
    "collate_fn",
    "dtype",
    "compile",
    "activation_memory_budget",
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
    # Both decide whether gradients are kept for the noise scale.
    "log_gradient_noise_scale",
    "batch_size_schedule",
]

# Numbers of an optimizer by which its memory depends on whether they are zero: momentum has a
# buffer, weight decay may have one.
_RATES = ("lr", "weight_decay", "betas", "eps", "momentum", "dampening", "alpha", "rho", "lr_decay")

_PACKAGES = ("torch", "torchtune", "torchao", "bitsandbytes", "adaptive-batch")


class ProbeCache:
    """Results of earlier searches with the same trials.

    Results are in ``probe.json``, curves of peaks in the user's cache folder. Rank zero asks for
    all ranks.

    Args:
        job: context of the run.
        data: rows of the run.
        scope: rows and pass of the search.
        options: options of the search.
        path: file of the results, or None.
    """

    def __init__(
        self,
        job: Job,
        data: Data,
        scope: SearchScope,
        options: ProbeOptions,
        *,
        path: Path | None,
    ) -> None:
        self._job = job
        self._scope = scope
        self._store = Store(path) if path else None
        probe = job.settings.probe
        self._reads = probe.cache
        described_choices = None
        if scope.choices is not None:
            # What is fastest depends on the lengths of all rows.
            lengths = zlib.crc32(data.dataset.lengths.numpy().tobytes())
            described_choices = [asdict(scope.choices), lengths]
        # Reading a row of some datasets draws random numbers, which training must not miss.
        with RandomState(job.device):
            shapes = _shapes(data.collator.collate(scope.rows.first(1)))
        self._settings = settings_name(job, data, scope.rows.length)
        self._conditions = [
            options.maximum,
            scope.accumulates,
            options.round_to_power_of_two,
            shapes,
            described_choices,
        ]
        # Another device needs another workspace of its kernels.
        kernels: list[Any] = []
        if job.device.type == "cuda":
            kernels = [
                torch.cuda.get_device_name(job.device),
                *torch.cuda.get_device_capability(job.device),
            ]
        self._curve_name = fingerprint(
            _conditions(job, data, scope.rows.length),
            kernels,
            scope.accumulates,
            scope.evaluation.kind if scope.evaluation else False,
            shapes,
        )
        self._curves = Store(cache_directory() / "curves" / f"{self._curve_name}.json")

    def known(self, budget: int) -> ProbeResult | None:
        """Return the result of a search within about the same budget, in bytes; None for none."""
        if self._store is None or not self._reads:
            return None
        return read_result(self._store, self._name(budget))

    def expected(self) -> MemoryCurve | None:
        """Return the curve of earlier trials, or else the estimate of it."""
        if not self._reads:
            return None
        # An invalid record only makes the search longer.
        with contextlib.suppress(ValueError, KeyError, TypeError, ArithmeticError):
            record = self._curves.get(self._curve_name) or {}
            return MemoryCurve(
                tuple(
                    Line(Fraction(fixed), Fraction(per_row), int(operation))
                    for fixed, per_row, operation in record["lines"]
                )
            )
        curve = self._estimate()
        self._keep(curve)
        return curve

    def learn(self, result: ProbeResult) -> None:
        """Store the result of a search, unless it came from the cache."""
        if result.from_cache:
            return
        self._keep(measured_curve(result.trials))
        if self._store is not None:
            record = {"settings": self._settings, **result.record()}
            self._store.put(self._name(result.budget_bytes), record)

    def _keep(self, curve: MemoryCurve | None) -> None:
        if self._reads and curve is not None:
            lines = [
                [str(line.fixed_bytes), str(line.bytes_per_row), line.operation]
                for line in curve.lines
            ]
            self._curves.put(self._curve_name, {"lines": lines})

    def _name(self, budget: int) -> str:
        allocator = [self._job.memory.describe(), *map(os.environ.get, ALLOCATOR_VARIABLES)]
        # What is available moves a little from run to run; a bound is worth the same within a
        # hundredth of it.
        about = round(math.log(max(1, budget), 1.01))
        return fingerprint(self._settings, allocator, *self._conditions, about)

    def _estimate(self) -> MemoryCurve | None:
        """Return the estimated curve of peaks; None if two trials show it, or it fails."""
        job = self._job
        probe = job.settings.probe
        # Memory that is counted to the byte lies on a line, which two trials show.
        is_counted = job.memory.granularity_bytes == 1
        if is_counted or self._scope.evaluation or distributed.world_size() > 1:
            return None
        if probe.search != "predict" or not probe.cache:
            return None
        start = time.perf_counter()
        try:
            curve = expected_curve(
                job.cfg,
                job.settings,
                self._scope.rows.first,
                accumulates=self._scope.accumulates,
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
    """Return a fingerprint of the settings that a result depends on.

    Args:
        job: context of the run.
        data: rows of the run.
        tokens: tokens of a row.
    """
    probe = job.settings.probe
    return fingerprint(
        _conditions(job, data, tokens), probe.search, probe.device_memory, probe.headroom
    )


def _conditions(job: Job, data: Data, tokens: int) -> list[Any]:
    """Return the configured values that a trial's memory depends on."""
    ranks = [distributed.data_parallel_size(), distributed.world_size()]
    keys = memory_keys(as_dict(job.cfg))
    return [
        keys,
        component_files(keys),
        {name: installed_version(name) for name in _PACKAGES},
        f"{type(job.builder).__module__}.{type(job.builder).__qualname__}",
        [tokens, data.packed, str(job.cfg.device), *ranks],
    ]


def memory_keys(configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration as far as memory depends on it.

    A sweep of learning rates is one to a cached bound.
    """
    keys = {key: configured.get(key) for key in _MEMORY_KEYS}
    keys["clip_grad_norm"] = keys["clip_grad_norm"] is not None
    keys["reference_apart"] = configured.get("reference_micro_batch_size") is not None
    optimizer = dict(configured["optimizer"])
    for key in _RATES:
        if key in optimizer:
            optimizer[key] = _are_zero(optimizer[key])
    keys["optimizer"] = optimizer
    return keys


def _are_zero(value: Any) -> Any:
    """Return whether each number is zero; return any other value unchanged."""
    if isinstance(value, list):
        return [_are_zero(part) for part in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return value == 0


def _shapes(batch: Any) -> Any:
    """Return shape and dtype of each tensor in a nested batch."""
    if isinstance(batch, torch.Tensor):
        return [list(batch.shape), str(batch.dtype)]
    if isinstance(batch, Mapping):
        return {str(key): _shapes(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_shapes(value) for value in batch]
    return type(batch).__name__

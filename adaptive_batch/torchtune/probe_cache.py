"""Results of earlier searches, by a fingerprint of everything that a trial's memory depends on."""

from __future__ import annotations

import logging
import math
import os
import time
import zlib
from dataclasses import asdict
from pathlib import Path

from adaptive_batch import distributed
from adaptive_batch._util import fingerprint, installed_version
from adaptive_batch.memory import ALLOCATOR_VARIABLES, MemoryCurve, RandomState, tensors_in
from adaptive_batch.probe import ProbeResult, Store, read_result
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

_PACKAGES = ("torch", "torchtune", "torchao", "bitsandbytes", "adaptive-batch")


class ProbeCache:
    """Results of earlier searches with the same trials. Rank zero asks for all ranks.

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
        timed = None
        if scope.layouts:
            # What is fastest depends on the lengths of all rows.
            lengths = zlib.crc32(data.dataset.lengths.numpy().tobytes())
            size = asdict(job.settings.micro_batch)
            timed = [scope.layouts, scope.timed_rows, size, lengths]
        # Reading a row of some datasets draws random numbers, which training must not miss.
        with RandomState(job.device):
            batch = data.collator.collate(scope.rows.first(1))
        shapes = [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors_in(batch)]
        self._settings = settings_name(job, data, scope.rows.length)
        self._conditions = [
            options.maximum,
            scope.accumulates,
            options.round_to_power_of_two,
            shapes,
            timed,
        ]

    def known(self, budget: int) -> ProbeResult | None:
        """Return the result of a search within about the same budget, in bytes; None for none."""
        if self._store is None or not self._job.settings.probe.cache:
            return None
        return read_result(self._store, self._name(budget))

    def learn(self, result: ProbeResult) -> None:
        """Store the result of a search, unless it came from the cache."""
        if self._store is not None and not result.from_cache:
            record = {"settings": self._settings, **result.record()}
            self._store.put(self._name(result.budget_bytes), record)

    def _name(self, budget: int) -> str:
        allocator = [self._job.memory.describe(), *map(os.environ.get, ALLOCATOR_VARIABLES)]
        # What is available moves a little from run to run; a bound is worth the same within a
        # hundredth of it.
        about = round(math.log(max(1, budget), 1.01))
        return fingerprint(self._settings, allocator, *self._conditions, about)

    def expected(self) -> MemoryCurve | None:
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
    configured = as_dict(job.cfg)
    keys = {key: configured.get(key) for key in _MEMORY_KEYS}
    keys["reference_apart"] = configured.get("reference_micro_batch_size") is not None
    return fingerprint(
        keys,
        component_files(keys),
        {name: installed_version(name) for name in _PACKAGES},
        f"{type(job.builder).__module__}.{type(job.builder).__qualname__}",
        [tokens, data.packed, str(job.cfg.device)],
        [distributed.data_parallel_size(), distributed.world_size()],
        [probe.search, probe.device_memory, probe.headroom],
    )

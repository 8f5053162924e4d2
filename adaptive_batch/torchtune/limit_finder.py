"""Search for the limits of a run, before training and again for longer rows; results of earlier
searches are reused.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import (
    described_with_files,
    fingerprint,
    installed_version,
    rows_fit,
)
from adaptive_batch.data import Batches, mean_rows
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState, tensors_in
from adaptive_batch.probe import ProbeResult, Store, Throughput
from adaptive_batch.training import (
    SearchScope,
    find_limit,
    has_batch_norm,
)

from .configuration import as_dict
from .data import Data
from .job import Job
from .resume import LostRun, ResumedRun
from .trainer import Trainer

log = logging.getLogger("adaptive_batch")

# Keys on which the memory of a trial depends.
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


def settings_name(job: Job, data: Data, tokens: int = 0) -> str:
    """Return a fingerprint of the settings that the result of a search depends on.

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
        described_with_files(keys),
        {name: installed_version(name) for name in _PACKAGES},
        f"{type(job.builder).__module__}.{type(job.builder).__qualname__}",
        # A split step has the gradients of earlier micro-batches in memory.
        [tokens, data.packed, str(job.cfg.device), job.settings.splits_steps],
        [distributed.data_parallel_size(), distributed.world_size()],
        [probe.search, probe.device_memory, probe.headroom],
    )


class LimitFinder:
    """Searches for the limits of a run, and sets them in sizers.

    Call :meth:`check` before the weights load, and the other methods after.

    Args:
        job: context of the run.
        data: rows of the run.
        event: function that logs an event: a kind, a message and facts.

    Attributes:
        path: file ``probe.json``; a result in it is reused after one trial.
        lost: record of an attempt that ended on all ranks. At most half of the rows of its trial
            are tried.
    """

    def __init__(
        self,
        job: Job,
        data: Data,
        *,
        event: Callable[..., object] = lambda kind, message, **facts: None,
    ) -> None:
        self._job = job
        self._data = data
        self._settings = job.settings
        # Training begins with a power of two at or below the maximum.
        self._rounds = (
            job.settings.probe.round_to_power_of_two and job.settings.use_maximum_batch_size
        )
        self.lost = LostRun(job, trials_name=settings_name(job, data))
        self._event = event
        self.path = Path(job.cfg.output_dir) / "adaptive_batch" / "probe.json"

    def check(self) -> None:
        """Read the rows of trials, and check settings against model and data.

        Raises:
            SettingError: the model does not take a probed length, training has longer rows, or the
                search may not try as many rows as the configured batch, from which the batch grows.
        """
        settings = self._settings
        grows_from_configured = (
            settings.batch_increase_function
            and not settings.use_maximum_batch_size
            and not settings.micro_batch_limit
        )
        if grows_from_configured and settings.batch_size > self.most_rows:
            remedy = (
                f"{self.most_rows} rows are tried at most, as probe.maximum, the rows of an epoch"
                f" and trials that ended all ranks allow; give {self.most_rows} or less"
            )
            raise SettingError("batch_size", settings.batch_size, remedy)
        length = settings.probe.sequence_length
        # Reading a row of some datasets draws random numbers, which training has to draw, too.
        with RandomState(self._job.device):
            for each in (length, *settings.probe.sequence_lengths):
                # Raises if a row cannot be resized.
                self._data.trial_rows(each).first(1)
        longest = int(self._data.dataset.lengths.max())
        if length != "longest" and self._data.trial_rows(length).length < longest:
            remedy = f"training has rows of {longest} tokens; give {longest} or more, or longest"
            raise SettingError("probe.sequence_length", length, remedy)

    @property
    def most_rows(self) -> int:
        """Most rows that a search for training tries: no more than a step or an epoch has."""
        settings = self._settings
        epoch_rows = max(1, len(self._data.dataset) // self._job.ranks)
        whole_step_rows = settings.whole_step_rows
        if whole_step_rows is not None:
            usable_rows = min(epoch_rows, whole_step_rows)
        elif settings.batch_tokens:
            # A step may have any number of rows.
            usable_rows = epoch_rows
        else:
            # Each of the accumulated batches has as many rows.
            usable_rows = epoch_rows // settings.gradient_accumulation_steps
        return self.rows_to_try(usable_rows)

    def rows_to_try(self, usable_rows: int, key: str = "trial_rows") -> int:
        """Return the most rows that a search tries.

        Args:
            usable_rows: most rows that could run at once, such as those of a step.
            key: kind of the trials, of :data:`.TRIALS`.
        """
        most_rows = min(self._settings.probe.maximum, usable_rows)
        # A trial of an earlier attempt that ended all ranks would end them again, so try at most
        # half of its rows.
        lost_rows = self.lost.trial_rows(key)
        if lost_rows:
            most_rows = min(most_rows, lost_rows // 2)
        return max(1, most_rows)

    # --- training ---------------------------------------------------------------------------------

    def find_limits(self, trainer: Trainer, batches: Batches, resumed: ResumedRun) -> None:
        """Search for the limits that the settings need, and set the batch size of training.

        A resumed run may keep the checkpoint's batch size, see :class:`.ResumedRun`.

        Raises:
            SettingError: a configured size, or one of the checkpoint's schedule, does not fit.
            DoesNotFitError: no row fits.
        """
        settings = self._settings
        sizer = trainer.engine.sizer
        saved_limits = resumed.state_of("limits")
        self._log_notes(trainer)
        trainer.check_layout()
        # Load the saved timings first, so that the search does not time micro-batches again.
        if settings.chooses_fastest and saved_limits:
            sizer.load_throughput(saved_limits, kinds=trainer.allowed_layouts())
        if settings.searches_training:
            result = self.search_training(
                trainer,
                length=settings.probe.sequence_length,
                kept_batch_size=batches.batch_size if resumed.keeps_batch else None,
            )
            sizer.check(result)
            sizer.set_bound(result)
            if sizer.throughput is not None:
                self._log_throughput(sizer.throughput)
            self._set_batch_size(batches, result, resumed)
        if saved_limits is not None:
            # Loading replaces the count of out-of-memory errors; add those of the search again.
            num_in_search = sizer.num_out_of_memory
            sizer.load_state_dict(saved_limits)
            sizer.count_out_of_memory(num_in_search)
        # An earlier run on several ranks ended with an OOM before it could save a smaller limit.
        lost_limit = self.lost.limit(sizer.conditions())
        if lost_limit is not None:
            sizer.start_below(lost_limit)
            limit = batches.limit
            message = f"a micro-batch holds {limit}: more ran out of memory before all ranks ended"
            self._event("limit", message, after=limit.amount, unit=limit.unit)
        fitting_rows = sizer.max_batch_size
        # A schedule may grow the batch to the maximum of the checkpoint.
        most_rows = max(batches.batch_size, batches.saved_maximum)
        if settings.optimizer_in_bwd and fitting_rows and most_rows > fitting_rows:
            raise SettingError(
                "optimizer_in_bwd",
                True,
                f"a step may have {most_rows} rows, of which {fitting_rows} fit here, and cannot be"
                " split into micro-batches; take a smaller batch or more memory, or start again"
                " with optimizer_in_bwd=False",
            )
        reference_sizer = trainer.reference_sizer
        if reference_sizer is not None:
            if settings.searches:
                result = self.search_reference(trainer, batch_size=batches.batch_size)
                reference_sizer.set_bound(result)
            saved_reference_limits = resumed.state_of("reference_limits")
            if saved_reference_limits is not None:
                reference_sizer.load_state_dict(saved_reference_limits)

    def search_training(
        self,
        trainer: Trainer,
        *,
        length: int | str,
        kept_batch_size: int | None = None,
    ) -> ProbeResult:
        """Find the most rows whose forward and backward fit and, if the settings choose them, the
        fastest micro-batches.

        Trials have the same tensors in memory as training. If a step does not fit at once, the
        search runs again with the gradients of earlier micro-batches in memory.

        Args:
            trainer: trainer of the run.
            length: ``longest``, ``max_seq_len`` or a number of tokens.
            kept_batch_size: batch size that the run keeps from a checkpoint, or None.

        Raises:
            DoesNotFitError: one row does not fit.
        """
        settings = self._settings
        # Rows of a step, if known. None with the optimizer in backward, which splits no step.
        whole_step_rows = None
        if not settings.optimizer_in_bwd:
            whole_step_rows = settings.whole_step_rows
            if kept_batch_size is not None:
                whole_step_rows = kept_batch_size * settings.gradient_accumulation_steps
        layouts: tuple[str, ...] = ()
        timed_rows = 0
        # Time micro-batches, unless the checkpoint has the fastest.
        if settings.chooses_fastest and trainer.engine.sizer.throughput is None:
            # 0 if steps have different numbers of rows: then as many as fit are timed.
            timed_rows = settings.whole_step_rows or 0
            if settings.batch_tokens and not settings.grows:
                timed_rows = mean_rows(settings.batch_tokens, self._data.dataset.lengths)
            layouts = trainer.allowed_layouts()
        # If the run began with more ranks, each rank now has more rows of a step.
        has_fewer_ranks = self._job.ranks > distributed.data_parallel_size()
        scope = SearchScope(
            self._data.trial_rows(length),
            accumulates=settings.splits_steps or has_fewer_ranks,
            whole_step_rows=whole_step_rows,
            layouts=layouts,
            timed_rows=timed_rows,
        )
        options = replace(
            settings.probe, maximum=self.most_rows, round_to_power_of_two=self._rounds
        )
        store = self._store(self.path, scope)
        results = find_limit(trainer.tried(), scope, options, store=store)
        return self._log_searches(trainer, results, kind="bound", target="the largest batch")

    def _log_notes(self, trainer: Trainer) -> None:
        """Log a model whose results depend on micro-batches, and trials that ended all ranks."""
        settings = self._settings
        may_change_micro_batches = settings.adaptive or settings.on_out_of_memory == "shrink"
        if may_change_micro_batches and has_batch_norm(trainer.model):
            message = (
                "the model has BatchNorm, whose statistics are those of a micro-batch: smaller ones"
                " change results"
            )
            self._event("batch_norm", message)
        for message in self.lost.describe_trials():
            self._event("indeterminate", message)

    def _log_throughput(self, fastest: Throughput) -> None:
        """Log the fastest micro-batches and all timed trials."""
        limit = fastest.limit
        self._event(
            "throughput",
            f"micro-batches of up to {limit.amount:,} {limit.unit}, {fastest.kind}:"
            f" {fastest.tokens_per_second:,.0f} tokens/s in their trial",
            layout=fastest.kind,
            **asdict(limit),
            tokens_per_second=fastest.tokens_per_second,
            seconds=fastest.seconds,
            trials=len(fastest.trials),
            timed=[asdict(trial) for trial in fastest.trials],
        )

    def _set_batch_size(self, batches: Batches, result: ProbeResult, resumed: ResumedRun) -> None:
        """Set the batch size that the search found, if the run takes it; otherwise log or refuse a
        batch size that does not fit.
        """
        settings = self._settings
        batch_size = batches.batch_size
        max_batch_size = result.max_batch_size
        can_split = settings.micro_batch_limit is not None or settings.batch_size_schedule
        if resumed.takes_found_batch:
            batches.set_batch_size(result.batch_size)
            change = f"batch_size {batch_size} -> {result.batch_size}"
            self._event(
                "batch_size",
                f"{change} (use_maximum_batch_size; bound {max_batch_size})",
                before=batch_size,
                after=result.batch_size,
                bound=max_batch_size,
            )
        elif resumed.keeps_batch and batch_size > max_batch_size:
            message = (
                f"batch_size {batch_size} is kept; {rows_fit(max_batch_size)} here, so it runs as"
                " more micro-batches"
            )
            self._event("limit", message, before=batch_size, after=max_batch_size, unit="rows")
        elif batch_size > max_batch_size and not can_split:
            remedy = (
                f"{rows_fit(max_batch_size)}; set batch_size={max_batch_size} or less"
                " (gradient_accumulation_steps makes up for it), or micro_batch_size=auto, or allow"
                " more memory"
            )
            raise SettingError("batch_size", batch_size, remedy)

    # --- the reference ----------------------------------------------------------------------------

    def search_reference(self, trainer: Trainer, *, batch_size: int) -> ProbeResult:
        """Find the most rows that fit in the pass of the frozen reference model before each step.

        Args:
            trainer: trainer of the run.
            batch_size: batch size of training. If steps do not grow, no more rows than those of a
                step are tried.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: a configured number of rows does not fit.
        """
        settings = self._settings
        size = settings.reference_micro_batch_size
        if isinstance(size, int):
            # The search only has to show whether the configured size fits.
            usable_rows = size
        elif settings.grows or settings.batch_tokens:
            # A step has at most the rows of an epoch.
            usable_rows = max(1, len(self._data.dataset) // self._job.ranks)
        else:
            usable_rows = batch_size * settings.gradient_accumulation_steps
        trial_rows = self._data.trial_rows(settings.probe.sequence_length)
        scope = SearchScope(trial_rows, reference=trainer.engine.try_reference)
        options = replace(
            settings.probe,
            maximum=self.rows_to_try(usable_rows, "trial_rows_reference"),
            round_to_power_of_two=False,
        )
        store = self._store(self.path.with_name("probe_reference.json"), scope)
        results = find_limit(trainer.tried(), scope, options, store=store)
        result = self._log_searches(
            trainer, results, kind="reference_bound", target="rows of the reference at once"
        )
        fitting_rows = result.max_batch_size
        if isinstance(size, int) and size > fitting_rows:
            remedy = f"{result.describe()}; give {fitting_rows} or less, or auto"
            raise SettingError("reference_micro_batch_size", size, remedy)
        return result

    # --- any search -------------------------------------------------------------------------------

    def _log_searches(
        self, trainer: Trainer, results: Sequence[ProbeResult], *, kind: str, target: str
    ) -> ProbeResult:
        """Log the results of :func:`find_limit`, and return the last one, which replaces the
        others. The sizer of training counts the out-of-memory errors of the trials.

        Args:
            trainer: trainer of the run.
            results: result of each search.
            kind: kind of the events.
            target: target of the search, for their messages.
        """
        for result in results:
            trainer.engine.sizer.count_out_of_memory(result.num_out_of_memory)
            self._event(
                kind,
                f"probe of {target}:\n{result.table()}",
                max_batch_size=result.max_batch_size,
                trials=len(result.trials),
                out_of_memory=result.num_out_of_memory,
                seconds=round(sum(result.seconds), 2),
                from_cache=result.from_cache,
                search=result.record(),
            )
        return results[-1]

    def _store(self, path: Path, scope: SearchScope) -> Store:
        """Return the results of earlier searches on the same rows under the same settings."""
        settings = self._settings
        # Reading a row of some datasets draws random numbers, which training has to draw, too.
        with RandomState(self._job.device):
            batch = self._data.collator.collate(scope.rows.first(1))
        conditions: list[Any] = [
            [list(tensor.shape), str(tensor.dtype)] for tensor in tensors_in(batch)
        ]
        if scope.layouts:
            # The fastest micro-batches depend on the lengths of all rows and on their order.
            conditions.append(zlib.crc32(self._data.dataset.lengths.numpy().tobytes()))
            conditions += [settings.sample_order, settings.sample_window]
            conditions += [settings.micro_batch_size, settings.micro_batch_tokens]
            conditions.append(settings.uniform_micro_batches)
        name = settings_name(self._job, self._data, scope.rows.length)
        return Store(path, name, conditions, reads=settings.probe.cache)

    def known(self) -> ProbeResult | None:
        """Return a result without a search: the assumed maximum, or that of an earlier search with
        the same settings. None without either.
        """
        probe = self._settings.probe
        maximum = probe.assumed_maximum
        length = self._data.trial_rows(probe.sequence_length).length
        if maximum is None:
            result = Store(self.path, settings_name(self._job, self._data, length)).newest()
            if result is None:
                return None
            maximum = result.max_batch_size
        # The dataset may have fewer rows than the earlier search tried.
        maximum = min(maximum, self.most_rows)
        batch_size = maximum
        if self._rounds:
            batch_size = 1 << (maximum.bit_length() - 1)
        return ProbeResult(maximum, batch_size, (), (), sequence_length=length)

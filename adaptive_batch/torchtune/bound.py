"""The search for the largest batch that a run's parts allow, in training and in validation."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from adaptive_batch import distributed
from adaptive_batch._util import file_signature, fingerprint
from adaptive_batch.data import longest_rows
from adaptive_batch.distributed import Watchdog
from adaptive_batch.errors import MEMORY_REMEDIES, DoesNotFitError, RankLostError, SettingError
from adaptive_batch.memory import (
    GIB,
    DeviceMemory,
    MemoryCurve,
    RandomState,
    budget_bytes,
    device_memory,
    optimizer_state_tensors,
    storage_bytes,
)
from adaptive_batch.probe import (
    BinarySearch,
    CachedCurve,
    DryRun,
    Halving,
    Predictive,
    ProbeResult,
    Search,
    Trial,
    load_latest,
    load_result,
    run_search,
    save_result,
    try_again,
)

from .fake_parts import Rows, expected_curve
from .parts import TrainingParts, package_version

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
    """Runs trials of what training will run, on the parts of a run.

    Use :meth:`check` before the weights are loaded and the others after.

    Args:
        parts: with their data built.

    Attributes:
        watch: over this rank, of several; keeps the time of trials.
        indeterminate: rows of a trial that ended all ranks before, without saying whether they fit; up to half of them are tried.
            None for none.
        indeterminate_val: the same of a trial of validation.
    """

    def __init__(self, parts: TrainingParts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._trials: dict[int | str, tuple[Rows, int]] = {}
        self.watch: Watchdog | None = None
        self.indeterminate: int | None = None
        self.indeterminate_val: int | None = None

    def check(self) -> None:
        """Choose the rows of trials, and refuse what the model's size or length, or the rows of an epoch, do not allow.

        Raises:
            SettingError: a probed length is beyond the model's, the memory allowed is below what its weights need, a
                configured batch is above what can be tried, or the device does not say what it uses.
        """
        parts, settings, probe = self._parts, self._settings, self._settings.probe
        grows_from_configured = settings.batch_increase_function is not None and not settings.use_maximum_batch_size
        most = self.most_rows
        splits = settings.micro_batch_size is not None or settings.micro_batch_tokens is not None
        if grows_from_configured and not splits and settings.batch_size > most:
            raise SettingError("batch_size", settings.batch_size, f"{self._why_most()}; give {most} or less")
        longest = parts.max_seq_len
        for length in dict.fromkeys((probe.sequence_length, *probe.sequence_lengths)):
            key = "probe.sequence_length" if length == probe.sequence_length else "probe.sequence_lengths"
            if longest and isinstance(length, int) and length > longest:
                raise SettingError(key, length, f"the model takes {longest} tokens at most")
            self._trials[length] = _, tokens = self.rows_of(length)
            if longest and tokens > longest:
                remedy = f"rows have up to {tokens} tokens, and the model takes {longest} at most"
                raise SettingError(key, length, f"{remedy}; set tokenizer.max_seq_len={longest} or less")
        if longest and settings.validation and settings.validation.fits_itself:
            tokens = int(parts.lengths_val.max())
            if tokens > longest:
                remedy = f"rows have up to {tokens} tokens, and the model takes {longest} at most"
                raise SettingError("batch_size_val", "auto", f"{remedy}; set tokenizer.max_seq_len={longest} or less")
        memory = self._memory()
        memory.check_it_can_be_measured()
        budget = self._budget(memory, memory.available_bytes(()))
        weights = sum(p.numel() * p.element_size() for p in parts.skeleton.parameters()) // distributed.world_size()
        of_each = " of each rank" if distributed.world_size() > 1 else ""
        on_host = distributed.world_size() > 1 and bool(parts.cfg.get("fsdp_cpu_offload", False))
        if weights > budget and not on_host:
            raise SettingError(
                "probe.device_memory",
                probe.device_memory,
                f"the model's weights alone need {weights / GIB:.2f} GiB{of_each}, and {budget / GIB:.2f} GiB may be used; "
                "allow more memory or take a smaller model",
            )

    def _budget(self, memory: DeviceMemory, available_bytes: int) -> int:
        probe = self._settings.probe
        return budget_bytes(
            probe.device_memory,
            headroom=probe.headroom,
            total_bytes=memory.total_bytes(),
            available_bytes=available_bytes,
        )

    @property
    def most_rows(self) -> int:
        """The most rows that are of use at once: what a step or an epoch has of them, and ``probe.maximum``."""
        settings, ranks = self._settings, self._parts.ranks
        rows = max(1, len(self._parts.dataset) // ranks)
        if settings.fits_itself and not (settings.batch_changes or settings.grows or settings.batch_tokens):
            of_use = min(rows, settings.step_rows)
        else:
            of_use = rows if settings.batch_tokens else max(1, rows // settings.gradient_accumulation_steps)
        return max(1, min(settings.probe.maximum, of_use, _half(self.indeterminate) or of_use))

    def _why_most(self) -> str:
        if self.most_rows == self._settings.probe.maximum:
            return f"probe.maximum is {self._settings.probe.maximum}"
        accumulated = self._settings.gradient_accumulation_steps
        ranks = f" for {self._parts.ranks} ranks" if self._parts.ranks > 1 else ""
        rows = f"an epoch has {len(self._parts.dataset)} rows{ranks}"
        return f"{rows} for {accumulated} micro-batches" if accumulated > 1 else rows

    def of_training(
        self, *, length: int | str, batch_size: int, path: Path, goes_on: bool = False
    ) -> list[ProbeResult]:
        """Find the largest number of rows whose forward and backward fit, with all that is resident in training.

        Args:
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
        settings = self._settings
        rows, tokens = self._trials.get(length) or self.rows_of(length)

        def search(*, accumulates: bool) -> ProbeResult:
            rounds = settings.probe.round_to_power_of_two and settings.use_maximum_batch_size
            return self._find(rows, tokens, maximum=self.most_rows, accumulates=accumulates, rounds=rounds, path=path)

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
        settings = self._settings
        has_own_number = isinstance(settings.micro_batch_size or settings.micro_batch_tokens, int)
        holds_more = self._parts.ranks > distributed.data_parallel_size()  # each rank, than batch_size
        grows_beyond = settings.grows and settings.grow_beyond_maximum
        return has_own_number or bool(settings.batch_tokens) or grows_beyond or holds_more

    def known(self, path: Path) -> tuple[int, int, str]:
        """What fits as far as it is known without trying: rows, the tokens of each, and where that is from; 0 rows for unknown."""
        probe = self._settings.probe
        _, tokens = self._trials.get(probe.sequence_length) or self.rows_of(probe.sequence_length)
        if probe.assumed_maximum is not None:
            return min(probe.assumed_maximum, self.most_rows), tokens, "probe.assumed_maximum says so"
        found = load_latest(path, settings=self._settings_name(tokens))
        if found is None:
            return 0, tokens, f"{path} has no search of these settings; plan with one by probe.assumed_maximum=N"
        return min(found.max_batch_size, self.most_rows), tokens, f"a search found that before ({path})"

    def of_row(self, row: dict[str, Any], *, maximum: int, accumulates: bool) -> ProbeResult:
        """The same for one row, repeated: for a row that is longer than any that was tried.

        Raises:
            DoesNotFitError: it does not fit.
        """
        return self._find(lambda size: [row] * size, len(row["tokens"]), maximum=maximum, accumulates=accumulates)

    def of_validation(self) -> ProbeResult:
        """Find the largest number of the longest rows of validation that fit, without gradients.

        Raises:
            DoesNotFitError: one row does not fit.
        """
        parts = self._parts
        lengths = parts.lengths_val
        order = longest_rows(lengths, len(lengths))
        tokens = int(lengths[order[0]])
        made: list[dict[str, Any]] = []

        def rows(size: int) -> list[dict[str, Any]]:
            made.extend(parts.dataset_val[row] for row in order[len(made) : size])
            return made[:size]

        most = min(len(order), self._settings.probe.maximum)
        maximum = min(most, _half(self.indeterminate_val) or most)
        result = self._find(rows, tokens, maximum=maximum, accumulates=False, evaluates=True)
        if result.max_batch_size == 0:
            raise DoesNotFitError(
                f"one row of {tokens} tokens of dataset_val does not fit in {result.budget_bytes / GIB:.2f} GiB, even without "
                f"gradients; {MEMORY_REMEDIES}"
            )
        return result

    def _find(
        self,
        rows: Rows,
        tokens: int,
        *,
        maximum: int,
        accumulates: bool,
        rounds: bool = False,
        evaluates: bool = False,
        path: Path | None = None,
    ) -> ProbeResult:
        random_state = RandomState(self._parts.device)  # reading a row of some datasets draws from it
        try:
            return self._search_on(
                rows,
                tokens,
                maximum=distributed.minimum(maximum),
                accumulates=accumulates,
                rounds=rounds,
                evaluates=evaluates,
                path=path,
            )
        finally:
            random_state.restore()

    def _search_on(
        self,
        rows: Rows,
        tokens: int,
        *,
        maximum: int,
        accumulates: bool,
        rounds: bool,
        evaluates: bool,
        path: Path | None,
    ) -> ProbeResult:
        parts, probe = self._parts, self._settings.probe
        memory = self._memory()
        resident = [*parts.model.parameters(), *parts.model.buffers(), *optimizer_state_tensors(parts.optimizers)]
        available = memory.available_bytes(resident)
        if parts.device.type == "cpu":  # the probe's own copies lie in the same memory
            available = max(1, available - storage_bytes(resident))
        budget = self._budget(memory, available)
        budgets = distributed.all_gather(budget)
        trained, trained_tokens = self._trials[probe.sequence_length] if evaluates else (rows, tokens)
        depends_on = self._fingerprint(rows(1), tokens, memory, min(budgets), maximum, accumulates, rounds)
        rehearsal = DryRun(
            model=parts.model,
            optimizer=parts.in_backward or parts.optimizer,
            forward_backward=lambda size: parts.accumulator.rehearse(trained(size)),
            step=parts.rehearse_step,
            accumulates=accumulates,
            memory=memory,
            budget_bytes=budget,
            row=f"one row of {trained_tokens} tokens",
            sharding=parts.accumulator.sharding,
            keep_gradients=None
            if self._settings.sync_gradients_every_micro_batch or distributed.world_size() == 1
            else lambda: self.keep_gradients(trained(1)),
        )
        log.info(
            "probing %srows of %d tokens on %s, up to %d rows in %.2f GiB",
            "validation of " if evaluates else "",
            tokens,
            memory.describe(),
            maximum,
            budget / GIB,
        )

        def run_trial(size: int) -> Trial:
            tried = rows(size)  # read before anything is measured
            with self.limit(f"a trial of {size} rows of {tokens} tokens"):
                if not evaluates:
                    return rehearsal(size)
                try:
                    return rehearsal.evaluation(
                        lambda _: parts.accumulator.evaluate(parts.collate_val(tried), rehearsing=True), size
                    )
                except RankLostError as lost:
                    lost.facts["trial_rows_val"] = size
                    raise

        is_cached = path is not None and probe.cache
        known = distributed.from_rank_zero(lambda: load_result(path, fingerprint=depends_on) if is_cached else None)
        try:
            with ExitStack() as stack:
                with self.limit("the first step of the probe"):
                    stack.enter_context(rehearsal)
                resident_bytes = distributed.maximum(rehearsal.resident_bytes)
                if evaluates and not parts.accumulator.sharding.knows_evaluation:
                    run_trial(1)  # from which a rank that fails knows what the others wait for
                result = known and try_again(known, run_trial)
                if result is None:
                    curve = CachedCurve(self._curve_name(rows(1), tokens, accumulates, evaluates), on=probe.cache)
                    result = run_search(
                        run_trial,
                        search=self._search(
                            memory,
                            budget_bytes=min(budgets),
                            maximum=maximum,
                            resident_bytes=resident_bytes,
                            expected=curve.read() or self._planned(rows, memory, curve, accumulates, evaluates),
                        ),
                        round_to_power_of_two=rounds,
                        sequence_length=tokens,
                    )
                    curve.learn(result.trials)
                result = replace(
                    result,
                    resident_bytes=resident_bytes,
                    budget_bytes=min(budgets),
                    budgets_of_ranks=tuple(budgets) if len(budgets) > 1 else (),
                )
        finally:
            if parts.cfg.compile:
                torch._dynamo.reset()  # the sizes of trials must not use up the compiler's limit of variants
        if path and distributed.is_rank_zero() and not result.from_cache:
            save_result(result, path, fingerprint=depends_on, settings=self._settings_name(tokens))
        return result

    def _fingerprint(
        self,
        rows: Sequence[dict[str, Any]],
        tokens: int,
        memory: DeviceMemory,
        budget_bytes: int,
        maximum: int,
        accumulates: bool,
        rounds: bool,
    ) -> str:
        """A name for everything that a bound depends on."""
        parts = self._parts
        return fingerprint(
            self._settings_name(tokens),
            [memory.describe(), os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), os.environ.get("PYTORCH_ALLOC_CONF")],
            [maximum, accumulates, rounds, distributed.data_parallel_size(), distributed.world_size()],
            _shapes(parts.collate(rows)),
            # what is available moves a little from run to run; a bound is worth the same within a hundredth of it
            round(math.log(max(1, budget_bytes), 1.01)),
        )

    @property
    def trials_name(self) -> str:
        """A name for what whether a trial fits depends on, as far as it is configured."""
        return self._settings_name(0)

    def _settings_name(self, tokens: int) -> str:
        """A name for the part of it that is the same wherever it is run."""
        parts, probe = self._parts, self._settings.probe
        plain = OmegaConf.to_container(parts.cfg, resolve=True)
        assert isinstance(plain, dict)
        return fingerprint(
            {key: plain.get(key) for key in _MEMORY_KEYS},
            {name: package_version(name) for name in _PACKAGES},
            [probe.search, tokens, parts.packed, str(parts.cfg.device), probe.device_memory, probe.headroom],
            distributed.world_size(),
        )

    def _curve_name(self, rows: Sequence[dict[str, Any]], tokens: int, accumulates: bool, evaluates: bool) -> str:
        """A name for everything that a peak depends on, whatever it may be."""
        parts = self._parts
        plain = OmegaConf.to_container(parts.cfg, resolve=True)
        assert isinstance(plain, dict)
        chosen = {key: plain.get(key) for key in (*_MEMORY_KEYS, "log_gradient_noise_scale", "batch_size_schedule")}
        return fingerprint(
            chosen,
            _sources(chosen),
            {name: package_version(name) for name in _PACKAGES},
            [tokens, parts.packed, parts.device.type, _kind_of(parts.device), accumulates, evaluates],
            [distributed.data_parallel_size(), distributed.world_size(), _shapes(parts.collate(rows))],
        )

    def _planned(
        self, rows: Rows, memory: DeviceMemory, curve: CachedCurve, accumulates: bool, evaluates: bool
    ) -> MemoryCurve | None:
        """What fake tensors say of peaks that are not counted; None where they cannot, and where two trials tell."""
        by_plan = self._settings.probe.search == "predict" and self._settings.probe.cache
        if memory.granularity_bytes == 1 or evaluates or distributed.world_size() > 1 or not by_plan:
            return None
        start = time.perf_counter()
        try:
            planned = expected_curve(self._parts.cfg, self._settings, rows, accumulates=accumulates)
        except Exception as error:  # it only shortens the search
            log.info("searching without a plan, which could not be made: %s: %s", type(error).__name__, error)
            return None
        log.info("planned on fake tensors in %.1f s what trials should peak at", time.perf_counter() - start)
        curve.write(planned)
        return planned

    def keep_gradients(self, rows: list[dict[str, Any]]) -> None:
        """Leave what there is in mid-step: unsharded gradients and, where noise is measured after the first micro-batch, its reduced ones."""
        if self._settings.measures_noise:
            self._parts.accumulator.rehearse(rows)
        self._parts.accumulator.rehearse(rows, is_last=False)

    def _memory(self) -> DeviceMemory:
        return device_memory(self._parts.device, shared_by=distributed.local_world_size())

    def limit(self, doing: str) -> AbstractContextManager[object]:
        """Within its context all ranks end where one does not come to the end of its trial in time."""
        seconds = self._settings.probe.trial_timeout
        return self.watch.limit(seconds, doing) if self.watch else nullcontext()

    def _search(
        self,
        memory: DeviceMemory,
        *,
        budget_bytes: int,
        maximum: int,
        resident_bytes: int,
        expected: MemoryCurve | None,
    ) -> Search:
        if expected is not None and self._settings.probe.search == "predict":
            rows = expected.max_rows(budget_bytes)
            most = maximum if rows is None else min(rows, maximum)
            log.info("from a plan or a search before, about %d rows should fit; each size that counts is tried", most)
        match self._settings.probe.search:
            case "binary":
                return BinarySearch(maximum=maximum)
            case "halve":
                return Halving(start=maximum)
            case _:
                return Predictive(
                    budget_bytes=budget_bytes,
                    maximum=maximum,
                    resident_bytes=resident_bytes,
                    granularity_bytes=memory.granularity_bytes,
                    expected=expected,
                )

    def rows_of(self, length: int | str) -> tuple[Callable[[int], list[dict[str, Any]]], int]:
        """A function that gives the first so many rows of a trial, and the tokens of the longest."""
        lengths = self._parts.lengths
        order = longest_rows(lengths, len(lengths))
        longest = int(lengths[order[0]])
        if length == "max_seq_len":
            limit = getattr(self._parts.tokenizer, "max_seq_len", None)
            if limit is None:
                raise SettingError(
                    "probe.sequence_length", length, "the tokenizer has no max_seq_len; set it, or give a number"
                )
            length = int(limit)
        target = longest if length == "longest" else int(length)
        made: list[dict[str, Any]] = []

        def rows(count: int) -> list[dict[str, Any]]:
            while len(made) < count:
                row = self._parts.dataset[order[len(made)]]
                made.append(row if length == "longest" else _resized(row, target))
            return made[:count]

        return rows, target


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


def _kind_of(device: torch.device) -> list[Any]:
    """What decides which kernels a device has."""
    if device.type != "cuda":
        return []
    return [torch.cuda.get_device_name(device), *torch.cuda.get_device_capability(device)]


def _shapes(batch: Any) -> Any:
    """MicroBatchLayout and dtypes of the tensors in a batch, nested as they are."""
    if isinstance(batch, torch.Tensor):
        return [list(batch.shape), str(batch.dtype)]
    if isinstance(batch, Mapping):
        return {str(key): _shapes(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_shapes(value) for value in batch]
    return type(batch).__name__

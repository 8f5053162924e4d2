"""Estimate of the memory on devices that are not here: the configuration's training step on fake
tensors, and single changes.

tune run adaptive_estimate --config NAME estimate.devices=80GiB
    [estimate.sequence_lengths=[1024,2048]] [estimate.world_size=8]
"""

from __future__ import annotations

import inspect
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig

from adaptive_batch import distributed
from adaptive_batch._util import check_whole, count, format_bytes
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.estimate import (
    AllocatorSettings,
    Change,
    EstimatedDevice,
    FakeDevice,
    Fit,
    LengthEstimate,
    MemoryEstimate,
    Resident,
    Target,
    alike,
    estimate_length,
    left_out,
    needs_values,
    parse_devices,
    ranked,
    runs_in_optimizer,
)
from adaptive_batch.memory import auto_headroom

from .checks import TO_PLAN, check_parallel, complete, not_read
from .config_errors import instantiate
from .estimate_changes import candidates, with_overrides
from .fake_run import FakeRun, Rows
from .job import own_compiler, task_of
from .keys import load_function
from .model import FullModel
from .settings import Settings


def estimate_devices(
    cfg: DictConfig,
    *,
    show: Callable[[str], object] = print,
    save: Callable[[MemoryEstimate], object] = lambda estimate: None,
    builder: FullModel | None = None,
) -> MemoryEstimate:
    """Estimate the memory on the devices that ``estimate.devices`` names, without weights, network
    or accelerator.

    Args:
        cfg: the configuration: YAML and key=value.
        show: is called with each table as soon as it is ready.
        save: is called with the estimate as soon as it is ready, and again when it has the single
            changes.
        builder: builds the model; None for full fine-tuning.

    Raises:
        SettingError: a setting cannot be used, or a component cannot run on fake tensors.
    """
    start = time.perf_counter()
    settings = Settings.from_config(cfg)
    complete(cfg, needs=TO_PLAN)
    estimate_settings = settings.estimate
    if distributed.is_launched():
        remedy = "run the estimate in one process; give ranks by estimate.world_size"
        raise SettingError("estimate.devices", estimate_settings.devices, remedy)
    for message in not_read(settings, cfg).values():
        show(message)
    estimator = Estimator(cfg, settings, parse_devices(estimate_settings.devices), builder)
    show("the training step runs on fake tensors")
    lengths, devices, not_counted = estimator.lengths()
    estimate = MemoryEstimate(
        devices=devices,
        lengths=lengths,
        maximum=settings.probe.maximum,
        world_size=estimate_settings.world_size,
        left_out=tuple(not_counted),
        seconds=round(time.perf_counter() - start, 2),
    )
    save(estimate)
    show(f"\n{estimate.table()}")
    if estimate_settings.changes:
        seconds = estimate.seconds / len(estimate.lengths)
        now = [target.lengths[0].max_batch_size for target in estimate.devices]
        show(f"single changes are estimated, each as long as one length took ({seconds:.0f} s)")
        tried = list(estimator.changes(estimate.lengths[0], fits=all(now)))
        estimate = replace(
            estimate,
            changes=ranked(tried, now),
            refused=tuple(change for change in tried if change.refused),
            seconds=round(time.perf_counter() - start, 2),
        )
        save(estimate)
        nothing = "no single change of those that could be estimated would let more fit"
        show(f"\n{estimate.table_of_changes() or nothing}")
        for change in estimate.refused:
            show(f"not estimated: {' '.join(change.overrides)}: {change.refused}")
    return estimate


class _Estimated(NamedTuple):
    """Memory by length on the first kind of device, the devices with the rows that fit, and
    the run of the first kind.
    """

    lengths: tuple[LengthEstimate, ...]
    devices: tuple[Target, ...]
    run: FakeRun


class Estimator:
    """Estimates one configuration and its variants for devices."""

    def __init__(
        self,
        cfg: DictConfig,
        settings: Settings,
        devices: Sequence[EstimatedDevice],
        builder: FullModel | None = None,
    ) -> None:
        self._cfg = cfg
        self._settings = settings
        self._builder = builder
        self._on_accelerator = not str(cfg.device).startswith("cpu")
        if self._on_accelerator and not str(cfg.device).startswith("cuda"):
            raise SettingError("device", cfg.device, "give cuda, which is ROCm's name too, or cpu")
        self._devices = devices
        self._alike = alike(devices) if self._on_accelerator else [list(range(len(devices)))]
        self._first_length: int | str = "longest"
        self._skeleton: torch.nn.Module | None = None
        self._paged: list[str] = []

    def lengths(self) -> tuple[tuple[LengthEstimate, ...], tuple[Target, ...], list[str]]:
        """Estimate each length; return what it holds, the devices with what fits there, and what is
        not counted.
        """
        estimate_settings = self._settings.estimate
        sequence_lengths = [
            self._resolved(length)
            for length in estimate_settings.lengths_of(self._settings.probe)[1]
        ]
        self._first_length = sequence_lengths[0]
        estimated = self._estimate(self._cfg, sequence_lengths, estimate_settings.world_size)
        self._skeleton = estimated.run.job.skeleton
        not_counted = [*self._paged, *estimated.run.left_out]
        if self._settings.micro_batch.needs_search:
            not_counted.append(
                "a step that fits as one micro-batch needs less: gradients of earlier ones are"
                " counted"
            )
        if self._on_accelerator and any(device.reference_rows for device in estimated.devices):
            not_counted.append(
                "what the reference's own micro-batches leave in the allocator's cache, and what it"
                " holds of them beside what they allocate"
            )
        architectures = [device.architecture for device in self._devices if self._on_accelerator]
        not_counted += left_out(
            estimated.run.trainer.models, architectures, world_size=estimate_settings.world_size
        )
        if not self._on_accelerator:
            not_counted.append(
                f"device={self._cfg.device}: what an accelerator takes beside tensors, and what is"
                " no tensor"
            )
        return estimated.lengths, estimated.devices, not_counted

    def _estimate(
        self,
        cfg: DictConfig,
        wanted: Sequence[int | str],
        world_size: int,
        *,
        is_change: bool = False,
        allocator: AllocatorSettings | None = None,
    ) -> _Estimated:
        """Estimate each length on each device."""
        if self._on_accelerator:
            allocator = allocator or AllocatorSettings.from_environment()
        devices = self._targets(world_size, allocator)
        # Reversed, so that the lengths of the first kind stay.
        for members in reversed(self._alike):
            targets = [devices[number] for number in members]
            reference_rows: list[tuple[int, ...]] = [()] * len(members)
            estimates = []
            with self._step(cfg, wanted, world_size, self._devices[members[0]]) as step:
                for sequence_length in wanted:
                    estimate = step.estimate(
                        sequence_length,
                        targets,
                        is_checked=not is_change,
                        allocator=allocator,
                    )
                    estimates.append(estimate)
                lengths, fits = zip(*estimates, strict=True)
                if step.run.has_paged_states and not is_change:
                    self._without_paged_states(step, wanted, targets, allocator)
                if step.has_reference_apart and not is_change:
                    of_lengths = [step.reference_rows(length, targets) for length in wanted]
                    reference_rows = list(zip(*of_lengths, strict=True))
            of_devices = zip(members, targets, zip(*fits, strict=True), reference_rows, strict=True)
            for number, target, own_fits, rows in of_devices:
                devices[number] = replace(target, lengths=own_fits, reference_rows=rows)
        return _Estimated(lengths, tuple(devices), step.run)

    def _without_paged_states(
        self,
        step: _Step,
        lengths: Sequence[int | str],
        targets: Sequence[Target],
        allocator: AllocatorSettings | None,
    ) -> None:
        """Note the rows that fit while an optimizer's paged states lie on the host."""
        paged = step.resident.optimizer
        larger = [replace(target, budget_bytes=target.budget_bytes + paged) for target in targets]
        for length in lengths:
            found, fits = step.estimate(length, larger, is_checked=False, allocator=allocator)
            for target, fit in zip(targets, fits, strict=True):
                self._paged.append(
                    f"{target.name}: without the paged states ({format_bytes(paged)}), which may"
                    f" lie on the host, {count(fit.max_batch_size, 'row')} of"
                    f" {found.sequence_length} tokens fit"
                )

    def _targets(self, world_size: int, allocator: AllocatorSettings | None) -> list[Target]:
        """Return what may be used of each device, with `world_size` ranks."""
        estimate = self._settings.estimate
        context = estimate.context if self._on_accelerator else 0
        headroom = estimate.headroom
        if headroom == "auto":
            expands = allocator is not None and allocator.expandable_segments
            headroom = auto_headroom(expands=expands and world_size == 1)
        return [device.target(context_bytes=context, headroom=headroom) for device in self._devices]

    def _resolved(self, length: int | str) -> int | str:
        """Return a length as a number if the configuration alone determines it."""
        if length != "max_seq_len":
            return length
        block = self._cfg.tokenizer
        if "max_seq_len" in block:
            limit = block.max_seq_len
        else:
            takes = inspect.signature(load_function(block._component_, key="tokenizer")).parameters
            # Only the tokenizer itself knows.
            if "max_seq_len" not in takes:
                return length
            limit = takes["max_seq_len"].default
        if limit is None:
            key, lengths = self._settings.estimate.lengths_of(self._settings.probe)
            value = length if len(lengths) == 1 else list(lengths)
            raise SettingError(
                key, value, "tokenizer.max_seq_len is not set; set it, or give a number of tokens"
            )
        task = task_of(self._cfg, instantiate("loss", self._cfg.loss))
        return check_whole("tokenizer.max_seq_len", limit) * len(task.fields)

    def changes(self, length: LengthEstimate, *, fits: bool) -> Iterator[Change]:
        """Estimate each single change at the first length, on each device.

        Args:
            length: estimate of that length as it is.
            fits: whether a row fits on each device as it is.
        """
        maximum = self._settings.probe.maximum
        assert self._skeleton is not None
        changes = candidates(
            self._cfg,
            self._skeleton,
            tokens=length.sequence_length,
            world_size=self._settings.estimate.world_size,
        )
        for candidate in changes:
            # More devices than 8 are of interest until a row fits.
            if (candidate.world_size or 0) > 8 and fits:
                break
            try:
                cfg = with_overrides(self._cfg, candidate.overrides)
                ranks = candidate.world_size or self._settings.estimate.world_size
                sequence_lengths = [candidate.sequence_length or self._first_length]
                estimated = self._estimate(
                    cfg, sequence_lengths, ranks, is_change=True, allocator=candidate.allocator
                )
            except Exception as error:
                # Components refuse each other in many ways.
                message = str(error).partition("\n")[0]
                if not isinstance(error, AdaptiveBatchError):
                    message = f"{type(error).__name__}: {message}"
                yield Change(candidate.overrides, candidate.cost, refused=message)
                continue
            fitting = [device.lengths[0].max_batch_size for device in estimated.devices]
            fits = fits or (candidate.world_size is not None and all(fitting))
            # At the maximum any number of rows may fit.
            bounds = tuple(None if rows == maximum else rows for rows in fitting)
            yield Change(candidate.overrides, candidate.cost, bounds)

    @contextmanager
    def _step(
        self, cfg: DictConfig, lengths: Sequence[int | str], world_size: int, of: EstimatedDevice
    ) -> Iterator[_Step]:
        ranks_of_a_model = check_parallel(cfg, world_size=world_size)
        with (
            distributed.fake_process_group(world_size, ranks_of_a_model=ranks_of_a_model),
            own_compiler(cfg),
        ):
            settings = Settings.from_config(cfg)
            reads_data = (
                any(isinstance(length, str) for length in lengths)
                or cfg.get("collate_fn", None) is not None
            )
            device = FakeDevice(of.kernels if self._on_accelerator else None)
            try:
                with warnings.catch_warnings():
                    # torch warns of bf16 norms.
                    warnings.filterwarnings(
                        "ignore", message="Mismatch dtype between input and weight"
                    )
                    yield _Step(
                        FakeRun(
                            cfg, settings, device, reads_data=reads_data, builder=self._builder
                        ),
                        lengths,
                    )
            except Exception as error:
                remedy = needs_values(error)
                if remedy is None:
                    raise
                raise _named(cfg, error, remedy) from error


class _Step:
    """The training step of a run whose model is not built yet, on fake tensors."""

    def __init__(self, run: FakeRun, lengths: Sequence[int | str]) -> None:
        self.run = run
        self._rows = {length: self._rows_of(length) for length in lengths}
        settings = run.job.settings
        rows, _ = self._rows[lengths[0]]
        keeps = distributed.world_size() > 1 and not settings.sync_gradients_every_micro_batch
        self._step = run.step(
            rows,
            accumulates=settings.search_plan.has_several or settings.micro_batch.needs_search,
            keeps_gradients=keeps,
        )

    @property
    def resident(self) -> Resident:
        """What is on the device before a forward."""
        return self._step.resident

    @property
    def has_reference_apart(self) -> bool:
        """Whether the reference runs in micro-batches of its own."""
        return self.run.trainer.engine.reference is not None

    def reference_rows(self, length: int | str, targets: Sequence[Target]) -> tuple[int, ...]:
        """Return the rows of one length that fit at once in the reference, for each device."""
        rows, _ = self._rows[length]
        curve = self.run.reference_curve(rows)
        maximum = self.run.job.settings.probe.maximum
        fitting = [curve.max_rows(target.budget_bytes) for target in targets]
        return tuple(
            maximum if fitting_rows is None else min(fitting_rows, maximum)
            for fitting_rows in fitting
        )

    def _rows_of(self, length: int | str) -> tuple[Rows, int]:
        if self.run.reads_data:
            worst = self.run.data.trial_rows(length)
            tokens = worst.length

            # Also more rows than the dataset has.
            def rows(count: int) -> list[dict[str, Any]]:
                some = worst.first(min(count, len(self.run.data.dataset)))
                return [some[number % len(some)] for number in range(count)]

        else:
            assert isinstance(length, int)
            tokens = length

            # It is on the host, and not counted.
            row = self.run.job.task.made_up_row(length, packed=self.run.data.packed)

            def rows(count: int) -> list[dict[str, Any]]:
                return [row] * count

        longest = self.run.job.max_row_length
        if longest and tokens > longest:
            key, _ = self.run.job.settings.estimate.lengths_of(self.run.job.settings.probe)
            raise SettingError(key, length, f"the model takes {longest} tokens at most")
        return rows, tokens

    def estimate(
        self,
        length: int | str,
        targets: Sequence[Target],
        *,
        is_checked: bool,
        allocator: AllocatorSettings | None,
    ) -> tuple[LengthEstimate, tuple[Fit, ...]]:
        """Estimate one length and what fits of it; see
        :func:`adaptive_batch.estimate.estimate_length`.
        """
        rows, tokens = self._rows[length]
        return estimate_length(
            self._step,
            tokens,
            targets,
            maximum=self.run.job.settings.probe.maximum,
            forward_backward=self.run.forward_backward(rows),
            is_checked=is_checked,
            allocator=allocator,
        )


def _named(cfg: DictConfig, error: Exception, remedy: str) -> SettingError:
    """Build the error that names the component whose code reads values of fake tensors."""
    key = "model"
    loss = str(cfg.loss._component_).rpartition(".")[2]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and type(owner).__name__ == loss:
            key = "loss"
    if runs_in_optimizer(error):
        key = "optimizer"
    return SettingError(key, str(cfg[key]._component_), remedy)

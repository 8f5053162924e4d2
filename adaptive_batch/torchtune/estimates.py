"""Estimate of the memory on other devices: the configuration's training step on fake tensors, and
single changes of the configuration.

tune run adaptive_estimate --config NAME estimate.devices=80GiB
    [estimate.sequence_lengths=[1024,2048]] [estimate.world_size=8]
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from omegaconf import DictConfig

from adaptive_batch import distributed
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.estimate import (
    AllocatorSettings,
    Change,
    EstimatedDevice,
    FakeDevice,
    LengthEstimate,
    MemoryEstimate,
    Target,
    estimate_length,
    explained_missing_values,
    group_by_kernels,
    left_out,
    parse_devices,
    rank_changes,
)
from adaptive_batch.memory import auto_headroom

from .changes import candidates
from .checks import (
    TO_PLAN,
    check_parallel,
    complete,
    without_effect,
)
from .configuration import instantiate, merged
from .fake_run import FakeRun
from .job import task_of
from .settings import Settings


def estimate_devices(
    cfg: DictConfig,
    *,
    show: Callable[[str], object] = print,
    save: Callable[[MemoryEstimate], object] = lambda estimate: None,
) -> MemoryEstimate:
    """Estimate the memory on the devices of ``estimate.devices``, without weights, network or
    accelerator.

    Args:
        cfg: configuration: YAML and key=value.
        show: function that is called with each table as soon as it is ready.
        save: function that is called with the estimate, and again when it has the single changes.

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
    for message in without_effect(settings, cfg).values():
        show(message)
    estimator = Estimator(cfg, settings, parse_devices(estimate_settings.devices))
    show("the training step runs on fake tensors")
    lengths, devices, run = estimator.estimate_lengths()
    estimate = MemoryEstimate(
        devices=devices,
        lengths=lengths,
        maximum=settings.probe.maximum,
        world_size=estimate_settings.world_size,
        left_out=tuple(estimator.left_out(run)),
        seconds=round(time.perf_counter() - start, 2),
    )
    save(estimate)
    show(f"\n{estimate.table()}")
    if not estimate_settings.changes:
        return estimate
    seconds = estimate.seconds / len(estimate.lengths)
    show(f"single changes are estimated, each as long as one length took ({seconds:.0f} s)")
    # Rows of the first length that fit on each device without a change.
    fitting_rows = [target.lengths[0].max_batch_size for target in estimate.devices]
    tried = list(
        estimator.estimate_changes(
            estimate.lengths[0], run.job.skeleton, fits=all(rows > 0 for rows in fitting_rows)
        )
    )
    estimate = replace(
        estimate,
        changes=rank_changes(tried, fitting_rows),
        refused=tuple(change for change in tried if change.refused),
        seconds=round(time.perf_counter() - start, 2),
    )
    save(estimate)
    nothing = "no single change of those that could be estimated would let more fit"
    show(f"\n{estimate.table_of_changes() or nothing}")
    for change in estimate.refused:
        show(f"not estimated: {' '.join(change.overrides)}: {change.refused}")
    return estimate


class Estimator:
    """Estimates one configuration and its variants for devices."""

    def __init__(
        self,
        cfg: DictConfig,
        settings: Settings,
        devices: Sequence[EstimatedDevice],
    ) -> None:
        self._cfg = cfg
        self._settings = settings
        self._on_accelerator = not str(cfg.device).startswith("cpu")
        if self._on_accelerator and not str(cfg.device).startswith("cuda"):
            raise SettingError("device", cfg.device, "give cuda, which is ROCm's name too, or cpu")
        self._devices = devices
        # Indices of devices that run the same kernels, and so share a fake run.
        self._groups = (
            group_by_kernels(devices) if self._on_accelerator else [list(range(len(devices)))]
        )
        configured = settings.estimate.sequence_lengths or (settings.probe.sequence_length,)
        self._lengths = [self._resolved(length) for length in configured]

    def estimate_lengths(self) -> tuple[tuple[LengthEstimate, ...], tuple[Target, ...], FakeRun]:
        """Estimate each configured length; the results are those of :meth:`_estimate`."""
        return self._estimate(self._cfg, self._lengths, self._settings.estimate.world_size)

    def left_out(self, run: FakeRun) -> list[str]:
        """Return a sentence for each kind of memory that is not counted."""
        not_counted = list(run.left_out)
        if self._settings.micro_batch_limit == "auto":
            not_counted.append(
                "a step that fits as one micro-batch needs less: gradients of earlier ones are"
                " counted"
            )
        if run.trainer.reference_sizer is not None:
            not_counted.append("the reference, which runs before the step in its own micro-batches")
        architectures = [device.architecture for device in self._devices if self._on_accelerator]
        not_counted += left_out(
            run.trainer.models, architectures, world_size=self._settings.estimate.world_size
        )
        if not self._on_accelerator:
            not_counted.append(
                f"device={self._cfg.device}: memory outside of tensors, such as an accelerator's"
                " context"
            )
        return not_counted

    def _estimate(
        self,
        cfg: DictConfig,
        lengths: Sequence[int | str],
        world_size: int,
        *,
        is_change: bool = False,
        allocator: AllocatorSettings | None = None,
    ) -> tuple[tuple[LengthEstimate, ...], tuple[Target, ...], FakeRun]:
        """Estimate each length on each device.

        Args:
            cfg: configuration, which may have a change.
            lengths: tokens of a row, or "longest".
            world_size: ranks that share the model.
            is_change: whether to skip the checks of the estimate, which take longer.
            allocator: settings of the allocator; None for those of the environment.

        Returns:
            The memory of each length on the first group of devices; all devices, each with the rows
            of each length that fit; and the fake run of the first group.
        """
        if self._on_accelerator:
            allocator = allocator or AllocatorSettings.from_environment()
        options = self._settings.estimate
        headroom = options.headroom
        if headroom == "auto":
            expands = allocator is not None and allocator.expandable_segments
            headroom = auto_headroom(expands=expands and world_size == 1)
        context = options.context if self._on_accelerator else 0
        targets = [
            device.target(context_bytes=context, headroom=headroom) for device in self._devices
        ]
        # The first group comes last, so that its estimates and its run are returned.
        for group in reversed(self._groups):
            group_targets = [targets[index] for index in group]
            with self._run(cfg, lengths, world_size, self._devices[group[0]]) as run:
                settings = run.job.settings
                # Refuse a length that is too long before the first is estimated, which takes long.
                rows_of_lengths = [run.rows_of(length) for length in lengths]
                first_make_rows, _ = rows_of_lengths[0]
                accumulates = settings.splits_steps or settings.micro_batch_limit == "auto"
                step = run.step(first_make_rows, accumulates=accumulates)
                results = [
                    estimate_length(
                        step,
                        tokens,
                        group_targets,
                        maximum=settings.probe.maximum,
                        forward_backward=run.forward_backward(make_rows),
                        is_checked=not is_change,
                        allocator=allocator,
                    )
                    for make_rows, tokens in rows_of_lengths
                ]
            for position, index in enumerate(group):
                fits = tuple(group_fits[position] for _, group_fits in results)
                targets[index] = replace(targets[index], lengths=fits)
        return tuple(estimate for estimate, _ in results), tuple(targets), run

    def _resolved(self, length: int | str) -> int | str:
        """Return "max_seq_len" as a number if the configuration has it, and other lengths as they
        are.
        """
        limit = self._cfg.tokenizer.get("max_seq_len")
        if length != "max_seq_len" or limit is None:
            return length
        task = task_of(self._cfg, instantiate("loss", self._cfg.loss))
        return int(limit) * len(task.fields)

    def estimate_changes(
        self, length: LengthEstimate, model: torch.nn.Module, *, fits: bool
    ) -> Iterator[Change]:
        """Estimate each single change at the first length, on each device.

        Args:
            length: estimate of that length without a change.
            model: model of the configuration; it may be without memory.
            fits: whether a row fits on each device without a change.
        """
        world_size = self._settings.estimate.world_size
        maximum = self._settings.probe.maximum
        one_fits = fits
        # The changes of world_size come last, from 2 to 128 ranks.
        for candidate in candidates(
            self._cfg, model, tokens=length.sequence_length, world_size=world_size
        ):
            # More than 8 devices are of interest only if a row does not fit on fewer.
            if one_fits and candidate.world_size is not None and candidate.world_size > 8:
                break
            # Arguments of `tune run` and environment variables are not keys.
            overrides = [
                override
                for override in candidate.overrides
                if not override.startswith(("--", "PYTORCH"))
            ]
            try:
                _, targets, _ = self._estimate(
                    merged(self._cfg, overrides),
                    [candidate.sequence_length or self._lengths[0]],
                    candidate.world_size or world_size,
                    is_change=True,
                    allocator=candidate.allocator,
                )
            # A change may contradict other keys, and components raise any kind of error. Report the
            # error, and estimate the other changes.
            except Exception as error:
                message = str(error).partition("\n")[0]
                if not isinstance(error, AdaptiveBatchError):
                    message = f"{type(error).__name__}: {message}"
                yield Change(candidate.overrides, candidate.cost, refused=message)
                continue
            fitting_rows = [target.lengths[0].max_batch_size for target in targets]
            if candidate.world_size is not None and all(rows > 0 for rows in fitting_rows):
                one_fits = True
            # The search ends at the maximum, so more rows may fit.
            bounds = tuple(None if rows == maximum else rows for rows in fitting_rows)
            yield Change(candidate.overrides, candidate.cost, bounds)

    @contextmanager
    def _run(
        self,
        cfg: DictConfig,
        lengths: Sequence[int | str],
        world_size: int,
        device: EstimatedDevice,
    ) -> Iterator[FakeRun]:
        """Context manager: run of a configuration on a fake device."""
        ranks_of_a_model = check_parallel(cfg, world_size=world_size)
        # "longest" is measured on the dataset, and a collate function may read any column of it.
        has_named_length = any(isinstance(length, str) for length in lengths)
        reads_data = has_named_length or bool(cfg.get("collate_fn", None))
        with (
            distributed.fake_process_group(world_size, ranks_of_a_model=ranks_of_a_model),
            warnings.catch_warnings(),
        ):
            # torch warns that float32 inputs and bf16 weights of a norm have no fused kernel.
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
            fake_device = FakeDevice(device.kernels if self._on_accelerator else None)
            with explained_missing_values(lambda key: str(cfg[key]._component_)):
                yield FakeRun(
                    cfg,
                    Settings.from_config(cfg),
                    fake_device,
                    reads_data=reads_data,
                )

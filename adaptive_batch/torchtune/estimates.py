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
from .job import own_compiler, task_of
from .model import FullModel
from .settings import Settings


def estimate_devices(
    cfg: DictConfig,
    *,
    show: Callable[[str], object] = print,
    save: Callable[[MemoryEstimate], object] = lambda estimate: None,
    builder: FullModel | None = None,
) -> MemoryEstimate:
    """Estimate the memory on the devices of ``estimate.devices``, without weights, network or
    accelerator.

    Args:
        cfg: configuration: YAML and key=value.
        show: function that is called with each table as soon as it is ready.
        save: function that is called with the estimate, and again when it has the single changes.
        builder: builder of the model; None for full fine-tuning.

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
    estimator = Estimator(cfg, settings, parse_devices(estimate_settings.devices), builder)
    show("the training step runs on fake tensors")
    lengths, devices, run = estimator.lengths()
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
    if estimate_settings.changes:
        seconds = estimate.seconds / len(estimate.lengths)
        now = [target.lengths[0].max_batch_size for target in estimate.devices]
        show(f"single changes are estimated, each as long as one length took ({seconds:.0f} s)")
        model = run.job.skeleton
        tried = list(estimator.changes(estimate.lengths[0], model, fits=all(now)))
        estimate = replace(
            estimate,
            changes=rank_changes(tried, now),
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
        builder: FullModel | None = None,
    ) -> None:
        self._cfg = cfg
        self._settings = settings
        self._builder = builder
        self._on_accelerator = not str(cfg.device).startswith("cpu")
        if self._on_accelerator and not str(cfg.device).startswith("cuda"):
            raise SettingError("device", cfg.device, "give cuda, which is ROCm's name too, or cpu")
        self._devices = devices
        self._alike = (
            group_by_kernels(devices) if self._on_accelerator else [list(range(len(devices)))]
        )
        wanted = settings.estimate.sequence_lengths or (settings.probe.sequence_length,)
        self._wanted = [self._resolved(length) for length in wanted]

    def lengths(self) -> tuple[tuple[LengthEstimate, ...], tuple[Target, ...], FakeRun]:
        """Estimate each length.

        Returns:
            The memory of each length on the first kind of device, the devices with the rows that
            fit, and the run on the first kind of device.
        """
        return self._estimate(self._cfg, self._wanted, self._settings.estimate.world_size)

    def left_out(self, run: FakeRun) -> list[str]:
        """Return a sentence for each thing that is not counted."""
        not_counted = list(run.left_out)
        if self._settings.micro_batch_limit == "auto":
            not_counted.append(
                "a step that fits as one micro-batch needs less: gradients of earlier ones are"
                " counted"
            )
        if run.trainer.engine.reference is not None:
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
        wanted: Sequence[int | str],
        world_size: int,
        *,
        is_change: bool = False,
        allocator: AllocatorSettings | None = None,
    ) -> tuple[tuple[LengthEstimate, ...], tuple[Target, ...], FakeRun]:
        """Estimate each length on each device; return also the run of the first kind of device."""
        if self._on_accelerator:
            allocator = allocator or AllocatorSettings.from_environment()
        options = self._settings.estimate
        headroom = options.headroom
        if headroom == "auto":
            expands = allocator is not None and allocator.expandable_segments
            headroom = auto_headroom(expands=expands and world_size == 1)
        context = options.context if self._on_accelerator else 0
        devices = [
            device.target(context_bytes=context, headroom=headroom) for device in self._devices
        ]
        # Reversed, so that the lengths of the first kind stay.
        for members in reversed(self._alike):
            targets = [devices[number] for number in members]
            with self._run(cfg, wanted, world_size, self._devices[members[0]]) as run:
                settings = run.job.settings
                # All lengths are checked before the first is estimated.
                rows = [run.rows_of(length) for length in wanted]
                accumulates = settings.has_several or settings.micro_batch_limit == "auto"
                step = run.step(rows[0][0], accumulates=accumulates)
                estimates = [
                    estimate_length(
                        step,
                        tokens,
                        targets,
                        maximum=settings.probe.maximum,
                        forward_backward=run.forward_backward(make_rows),
                        is_checked=not is_change,
                        allocator=allocator,
                    )
                    for make_rows, tokens in rows
                ]
                lengths, fits = zip(*estimates, strict=True)
            for number, target, own_fits in zip(
                members, targets, zip(*fits, strict=True), strict=True
            ):
                devices[number] = replace(target, lengths=own_fits)
        return lengths, tuple(devices), run

    def _resolved(self, length: int | str) -> int | str:
        """Return a length as a number if the configuration has it."""
        limit = self._cfg.tokenizer.get("max_seq_len")
        if length != "max_seq_len" or limit is None:
            return length
        task = task_of(self._cfg, instantiate("loss", self._cfg.loss))
        return int(limit) * len(task.fields)

    def changes(
        self, length: LengthEstimate, model: torch.nn.Module, *, fits: bool
    ) -> Iterator[Change]:
        """Estimate each single change at the first length, on each device.

        Args:
            length: estimate of that length without a change.
            model: model of the configuration; it may be without memory.
            fits: whether a row fits on each device without a change.
        """
        options = self._settings.estimate
        maximum = self._settings.probe.maximum
        changes = candidates(
            self._cfg,
            model,
            tokens=length.sequence_length,
            world_size=options.world_size,
        )
        for candidate in changes:
            # More devices than 8 are of interest until a row fits.
            if (candidate.world_size or 0) > 8 and fits:
                break
            # Arguments of `tune run` and the environment are not keys.
            overrides = [
                override
                for override in candidate.overrides
                if not override.startswith(("--", "PYTORCH"))
            ]
            try:
                _, devices, _ = self._estimate(
                    merged(self._cfg, overrides),
                    [candidate.sequence_length or self._wanted[0]],
                    candidate.world_size or options.world_size,
                    is_change=True,
                    allocator=candidate.allocator,
                )
            except Exception as error:
                # Components refuse each other in many ways.
                message = str(error).partition("\n")[0]
                if not isinstance(error, AdaptiveBatchError):
                    message = f"{type(error).__name__}: {message}"
                yield Change(candidate.overrides, candidate.cost, refused=message)
                continue
            fitting = [device.lengths[0].max_batch_size for device in devices]
            fits = fits or (candidate.world_size is not None and all(fitting))
            # At the maximum any number of rows may fit.
            bounds = tuple(None if rows == maximum else rows for rows in fitting)
            yield Change(candidate.overrides, candidate.cost, bounds)

    @contextmanager
    def _run(
        self,
        cfg: DictConfig,
        lengths: Sequence[int | str],
        world_size: int,
        device: EstimatedDevice,
    ) -> Iterator[FakeRun]:
        """Context manager: one configuration's run on a fake device."""
        ranks_of_a_model = check_parallel(cfg, world_size=world_size)
        # "longest" is measured on the dataset.
        reads_data = any(isinstance(length, str) for length in lengths) or bool(
            cfg.get("collate_fn", None)
        )
        with (
            distributed.fake_process_group(world_size, ranks_of_a_model=ranks_of_a_model),
            own_compiler(cfg),
            warnings.catch_warnings(),
        ):
            # torch warns of bf16 norms.
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
            fake = FakeDevice(device.kernels if self._on_accelerator else None)
            with explained_missing_values(lambda key: str(cfg[key]._component_)):
                yield FakeRun(
                    cfg,
                    Settings.from_config(cfg),
                    fake,
                    reads_data=reads_data,
                    builder=self._builder,
                )

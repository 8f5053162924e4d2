"""Estimate of the memory on other devices: the training step of a configuration on fake tensors,
without weights or a device, and single changes of the configuration.

tune run adaptive_estimate --config NAME estimate.devices=80GiB
    [estimate.sequence_lengths=[1024,2048]] [estimate.world_size=8]
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune.data import padded_collate_packed
from torchtune.training import OffloadActivations

from adaptive_batch import distributed
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import replaced
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.estimate import (
    AllocatorSettings,
    Change,
    CompiledParts,
    EstimatedDevice,
    FakeDevice,
    FakeStep,
    LengthEstimate,
    MemoryEstimate,
    Target,
    check_compiler,
    estimate_length,
    explained_missing_values,
    group_by_kernels,
    left_out,
    parse_devices,
    rank_changes,
)
from adaptive_batch.memory import auto_headroom
from adaptive_batch.training import MicroBatchSizer

from .changes import candidates
from .checks import (
    TO_PLAN,
    check_parallel,
    complete,
    values_at,
    without_effect,
)
from .configuration import instantiate, merged
from .data import Data
from .job import Job, restored_compiler, task_of
from .model import FullModel, build_without_weights, compute_rotary_buffers
from .settings import Settings
from .trainer import Trainer

private = PrivateNames("memory estimates")

MakeRows = Callable[[int], list[dict[str, Any]]]

_BITSANDBYTES = "bitsandbytes."


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
    lengths, devices, run = estimator.estimate(cfg, estimator.lengths, estimate_settings.world_size)
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
    """Estimates one configuration and its variants for devices.

    Attributes:
        lengths: configured lengths of a row, in tokens or "longest".
    """

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
        self.lengths = [self._resolved(length) for length in configured]

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

    def estimate(
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
                _, targets, _ = self.estimate(
                    merged(self._cfg, overrides),
                    [candidate.sequence_length or self.lengths[0]],
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
            restored_compiler(),
            offloading_fake_tensors(),
        ):
            # torch warns that float32 inputs and bf16 weights of a norm have no fused kernel.
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
            # torchtune warns about the memory of this machine, to which nothing is offloaded.
            warnings.filterwarnings("ignore", message=".* of virtual memory used")
            fake_device = FakeDevice(device.kernels if self._on_accelerator else None)
            with explained_missing_values(lambda key: str(cfg[key]._component_)):
                yield FakeRun(cfg, fake_device, reads_data=reads_data)


# --- a run on fake tensors


class FakeRun:
    """Model, data and optimizer of a training run on a :class:`FakeDevice`.

    Args:
        cfg: configuration of the recipe, with the device of the real run.
        device: fake device.
        reads_data: whether rows come from the configured dataset; else they are synthetic, and no
            file is read.

    Attributes:
        device: fake device.

    Raises:
        SettingError: a component cannot be counted on fake tensors.
    """

    def __init__(
        self,
        cfg: DictConfig,
        device: FakeDevice,
        *,
        reads_data: bool,
    ) -> None:
        settings = Settings.from_config(cfg)
        self.device = device
        self._compiled_parts = CompiledParts(device)
        self.reads_data = reads_data
        self._left_out: list[str] = []
        self._on_accelerator = not str(cfg.device).startswith("cpu")
        # Packed rows run one attention kernel in bf16 on an accelerator, and otherwise one for each
        # row. The number of operations would then depend on the rows, and a curve of the memory
        # needs the same operations at each size.
        has_one_kernel = self._on_accelerator and str(cfg.dtype) in ("bf16", "bfloat16")
        if settings.layout_kind == "packed" and not has_one_kernel:
            self._left_out.append(
                f"micro_batch_layout={settings.micro_batch_layout}: rows are counted as padded to"
                " the longest one"
            )
            settings = replace(settings, micro_batch_layout=None)
        self.job = Job(
            self._config_on_cpu(cfg),
            settings,
            needs=TO_PLAN,
            with_values=self._with_values,
        )
        if reads_data:
            with _offline():
                self.data = Data.read(self.job)
        else:
            self.job.check_model()
            packed = any(values_at(cfg, "dataset.packed"))
            self.data = Data(
                self.job, [self.job.task.synthetic_row(8, packed=packed)], packed=packed
            )
        if self.data.packed and self._on_accelerator:
            self._left_out.append(
                "flex attention: packed rows are counted with a mask of tokens x tokens, and it"
                " needs less"
            )

    def _config_on_cpu(self, cfg: DictConfig) -> DictConfig:
        """Return a copy of the configuration for fake CPU tensors.

        `compile` is False in the copy, and recorded as left out, if the compiled step cannot be
        counted.
        """
        on_cpu = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
        assert isinstance(on_cpu, DictConfig)
        on_cpu.device = "cpu"
        if on_cpu.get("fsdp_cpu_offload", False):
            remedy = (
                "an estimate cannot separate host from device memory; estimate with False, which"
                " needs more"
            )
            raise SettingError("fsdp_cpu_offload", True, remedy)
        if on_cpu.get("compile", False):
            why_eager: str | None
            if not self._on_accelerator:
                why_eager = "as the memory of a CPU always is"
            elif distributed.data_parallel_size() < distributed.world_size():
                why_eager = "tensor parallelism is not counted as compiled"
            else:
                why_eager = check_compiler()
            if why_eager is not None:
                self._left_out.append(
                    f"compile=True: the step is counted as the eager program: {why_eager}"
                )
            on_cpu.compile = why_eager is None
        return on_cpu

    @property
    def left_out(self) -> tuple[str, ...]:
        """Differences between the estimate and the device, one sentence each."""
        return tuple(dict.fromkeys((*self._left_out, *self._compiled_parts.left_out)))

    # --- data

    def _with_values(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that makes batches, outside the modes of fake tensors: collation
        reads the values of tokens.
        """
        if make is padded_collate_packed:
            make = self._collate_packed
        wrapped: Callable[..., Any] = private.disable_current_modes()(make)
        return wrapped

    def _collate_packed(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate packed rows as torchtune does, but with a fake mask: a real one of tokens x
        tokens for each row may not fit in host memory.
        """
        batch = {
            key: torch.stack([row[key] for row in rows])
            for key in ("tokens", "labels", "input_pos")
        }
        count, tokens = batch["tokens"].shape
        with self.device.mode:
            batch["mask"] = torch.empty(count, tokens, tokens, dtype=torch.bool)
        return batch

    # --- model and optimizer

    def rows_of(self, length: int | str) -> tuple[MakeRows, int]:
        """Return a function that makes a number of rows of a length, and the tokens of a row.

        Raises:
            SettingError: the model takes fewer tokens.
        """
        if self.reads_data:
            trial_rows = self.data.trial_rows(length)
            tokens = trial_rows.length

            def make_rows(count: int) -> list[dict[str, Any]]:
                first = trial_rows.first(min(count, len(self.data.dataset)))
                # Repeat them if more rows are asked for than the dataset has.
                return [first[number % len(first)] for number in range(count)]

        else:
            tokens = int(length)
            row = self.job.task.synthetic_row(tokens, packed=self.data.packed)

            def make_rows(count: int) -> list[dict[str, Any]]:
                return [row] * count

        longest = self.job.max_row_length
        if longest and tokens > longest:
            remedy = f"the model takes {longest} tokens at most"
            raise SettingError("estimate.sequence_lengths", length, remedy)
        return make_rows, tokens

    def step(self, make_rows: MakeRows, *, accumulates: bool) -> FakeStep:
        """Build model and optimizer, and return the step that training would run.

        Args:
            make_rows: function that makes a number of rows.
            accumulates: see :class:`FakeStep`.
        """
        job = self.job
        model = self._build_model(job.builder, job.cfg)
        second = None
        if job.second is not None:
            second = self._build_model(job.second.builder, job.second.cfg)
        self.trainer = Trainer(
            self.job,
            self.data,
            model,
            MicroBatchSizer(layout=self.data.configured_layout, memory=self.job.memory),
            second=second,
            to_device=self.device.move_batch,
            new_optimizer=self._new_optimizer,
        )
        if self.job.cfg.compile:
            for loss_fn in self.job.task.losses:
                self._compiled_parts.take_over_attributes(loss_fn)
        tried_step = self.trainer.tried()
        keep_gradients = None
        if tried_step.keep_gradients:
            keep_gradients = partial(tried_step.keep_gradients, make_rows(1))
        return FakeStep(
            model=self.trainer.models,
            optimizer=tried_step.optimizer,
            forward_backward=self.forward_backward(make_rows),
            step=tried_step.step,
            accumulates=accumulates,
            device=self.device,
            sharding=self.trainer.engine.sharding,
            keep_gradients=keep_gradients,
        )

    def forward_backward(self, make_rows: MakeRows) -> Callable[[int], object]:
        """Return a function that runs forward and backward of a number of rows as training does."""
        return lambda num_rows: self.trainer.engine.try_rows(make_rows(num_rows))

    def _build_model(self, builder: FullModel, cfg: DictConfig) -> torch.nn.Module:
        """Build a model on the fake device."""
        job = self.job
        model = build_without_weights(
            cfg, builder, dtype=job.dtype, device=job.device, on_meta=True
        )
        # Some models read the values of their buffers, so these are real.
        fill = partial(compute_rotary_buffers, model, dtype=job.dtype, device=job.device)
        self.device.move(model, fill=fill)
        self._compiled_parts.take_over_modules(model)
        return model

    def _new_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Build the configured optimizer, or one with the same states if its own needs a device."""
        component = str(self.job.cfg.optimizer._component_)
        if component.startswith(_BITSANDBYTES):
            self._left_out.append(
                "bitsandbytes: its states are counted by their documented sizes, and paged ones,"
                " which may lie on the host, as if on the device"
            )
            with self.device.mode:
                return StatesOfBitsandbytes(parameters, component)
        with self.device.mode:
            optimizer = self.job.new_optimizer(parameters)
        for sentence in self.device.prepare_optimizer(optimizer):
            self._left_out.append(sentence)
        return optimizer


@contextmanager
def _offline() -> Iterator[None]:
    """Context manager: let the libraries that download datasets read only local files."""
    import datasets
    from huggingface_hub import constants

    datasets_offline = replaced(datasets.config, HF_HUB_OFFLINE=True, HF_DATASETS_OFFLINE=True)
    with replaced(constants, HF_HUB_OFFLINE=True), datasets_offline:
        yield


class StatesOfBitsandbytes(torch.optim.Optimizer):
    """States of an optimizer of bitsandbytes, without its step, which needs a device.

    An optimizer has one state for each of its moments. An 8-bit state has one byte per element and
    one float32 per block of 256 elements. Parameters of fewer than 4096 elements have float32
    states, as in optimizers that are not 8-bit (bitsandbytes 0.50.2, optim/optimizer.py:
    ``init_state``).

    Raises:
        SettingError: the sizes of the optimizer's states are unknown.
    """

    _MOMENTS: ClassVar[dict[str, int]] = {
        "AdamW": 2,
        "Adam": 2,
        "Lion": 1,
        "SGD": 1,
        "RMSprop": 1,
        "Adagrad": 1,
    }

    def __init__(self, parameters: Iterable[torch.nn.Parameter], component: str) -> None:
        # bitsandbytes.optim.PagedAdamW8bit is an AdamW with 8-bit states.
        name = component.rpartition(".")[2].removeprefix("Paged")
        kind = name.removesuffix("8bit").removesuffix("32bit")
        if kind not in self._MOMENTS:
            remedy = (
                "the size of its states is not known; estimate with one of"
                f" {', '.join(self._MOMENTS)} of bitsandbytes"
            )
            raise SettingError("optimizer._component_", component, remedy)
        self._moments = self._MOMENTS[kind]
        self._is_8bit = name.endswith("8bit")
        super().__init__(parameters, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Allocate the states of parameters that do not have them yet; change no parameter."""
        for parameter in chain.from_iterable(group["params"] for group in self.param_groups):
            state = self.state[parameter]
            if parameter.grad is None or state:
                continue
            is_8bit = self._is_8bit and parameter.numel() >= 4096
            dtype = torch.uint8 if is_8bit else torch.float32
            for number in range(self._moments):
                state[f"state{number}"] = torch.zeros_like(parameter, dtype=dtype)
                if is_8bit:
                    num_blocks = math.ceil(parameter.numel() / 256)
                    state[f"absmax{number}"] = torch.zeros(num_blocks, dtype=torch.float32)


# --- torchtune's offloading of activations on fake tensors


class _DefaultStream(torch.cpu.Stream, torch.Stream):  # type: ignore[misc]
    """CPU stream that does nothing, of the type that ``record_stream`` accepts."""

    def __new__(cls) -> _DefaultStream:
        return torch.Stream.__new__(cls, stream_id=0, device_index=0, device_type=0)


class _HostCopy:
    """Host copy of a tensor: a shape that takes no memory of the device."""

    def __init__(self, tensor: torch.Tensor, **_: Any) -> None:
        # Hidden from counters of allocations.
        with private.disable_current_modes():
            self._like = torch.empty_like(tensor)

    def copy_(self, *_: Any, **__: Any) -> None:
        """Copy no values, as there are none."""

    def to(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return a new tensor on the device."""
        return torch.empty_like(self._like)


class _WithoutCUDA:
    """Replacement of `torch` in torchtune's module, with CPU streams and host copies."""

    cuda = SimpleNamespace(
        default_stream=_DefaultStream, Stream=torch.cpu.Stream, stream=torch.cpu.stream
    )
    empty_like = _HostCopy

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def offloading_fake_tensors() -> AbstractContextManager[None]:
    """Context manager: torchtune offloads fake tensors instead of those of a GPU."""
    module = sys.modules[OffloadActivations.__module__]
    return replaced(module, torch=_WithoutCUDA())

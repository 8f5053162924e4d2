"""A run on fake tensors: the model, data and optimizer of a configuration, without weights, files
or a device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig, OmegaConf
from torch.nn.modules.module import register_module_parameter_registration_hook
from torchtune.data import padded_collate_packed
from torchtune.modules import attention_utils
from torchtune.training import OffloadActivations

from adaptive_batch import distributed
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import replaced
from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import (
    CompiledParts,
    CudaKernels,
    FakeDevice,
    FakeStep,
    check_compiler,
    trace_pair,
)
from adaptive_batch.memory import MemoryCurve

from .checks import TO_PLAN, values_at
from .data import Data
from .job import Job, own_compiler
from .model import FullModel, build_without_weights, compute_rotary_buffers
from .settings import Settings
from .trainer import Trainer

private = PrivateNames("memory estimates")

MakeRows = Callable[[int], list[dict[str, Any]]]

_BITSANDBYTES = "bitsandbytes."


class FakeRun:
    """Model, data and optimizer of a training run on a :class:`FakeDevice`.

    Args:
        cfg: configuration of the recipe, with the device of the real run.
        settings: its keys, checked.
        device: fake device.
        reads_data: whether rows come from the configured dataset; else they are synthetic, and no
            file is read.
        builder: builder of the model; None for full fine-tuning.

    Attributes:
        device: fake device.

    Raises:
        SettingError: a component cannot be counted on fake tensors.
    """

    def __init__(
        self,
        cfg: DictConfig,
        settings: Settings,
        device: FakeDevice,
        *,
        reads_data: bool,
        builder: FullModel | None = None,
    ) -> None:
        self.device = device
        self._compiled_parts = CompiledParts(device)
        self.reads_data = reads_data
        self._left_out: list[str] = []
        self._on_accelerator = not str(cfg.device).startswith("cpu")
        one_kernel = self._on_accelerator and str(cfg.dtype) in ("bf16", "bfloat16")
        # Each number of rows would run different operations.
        if not settings.layout_kind.pads and not one_kernel:
            self._leave_out(
                f"micro_batch_layout={settings.micro_batch_layout}: rows are counted as padded to"
                " the longest one"
            )
            settings = replace(settings, micro_batch_layout=None)
        self.job = Job(
            self._eager_on_cpu(cfg),
            settings,
            builder,
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
            self._leave_out(
                "flex attention: packed rows are counted with a mask of tokens x tokens, and it"
                " needs less"
            )

    def _eager_on_cpu(self, cfg: DictConfig) -> DictConfig:
        """Return a configuration for fake CPU tensors, and record what it omits."""
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
            reason: str | None = "as the memory of a CPU always is"
            if self._on_accelerator:
                reason = check_compiler()
                if distributed.data_parallel_size() < distributed.world_size():
                    reason = "tensor parallelism is not counted as compiled"
            if reason is not None:
                self._leave_out(f"compile=True: the step is counted as the eager program: {reason}")
            on_cpu.compile = reason is None
        return on_cpu

    def _leave_out(self, sentence: str) -> None:
        if sentence not in self._left_out:
            self._left_out.append(sentence)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Differences between the estimate and the device, one sentence each."""
        return (*self._left_out, *self._compiled_parts.left_out)

    # --- data

    def _with_values(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes batches of real values, whatever is fake around it."""
        if make is padded_collate_packed:
            make = self._collate_packed
        wrapped: Callable[..., Any] = private.disable_current_modes()(make)
        return wrapped

    def _collate_packed(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate packed rows as torchtune does; the mask, of tokens x tokens for each, is fake
        from the start.
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
        """Return a function that makes rows of a length, and their tokens.

        Raises:
            SettingError: the model takes fewer tokens.
        """
        if self.reads_data:
            worst = self.data.trial_rows(length)
            tokens = worst.length

            # Also more rows than the dataset has.
            def rows(count: int) -> list[dict[str, Any]]:
                some = worst.first(min(count, len(self.data.dataset)))
                return [some[number % len(some)] for number in range(count)]

        else:
            tokens = int(length)
            # It is on the host, and not counted.
            row = self.job.task.synthetic_row(tokens, packed=self.data.packed)

            def rows(count: int) -> list[dict[str, Any]]:
                return [row] * count

        longest = self.job.max_row_length
        if longest and tokens > longest:
            remedy = f"the model takes {longest} tokens at most"
            raise SettingError("estimate.sequence_lengths", length, remedy)
        return rows, tokens

    def step(self, rows: MakeRows, *, accumulates: bool) -> FakeStep:
        """Build model and optimizer, and return the step that training would run; for the arguments
        see :class:`FakeStep`.
        """
        model, second = self._build()
        with offloading_fake_tensors():
            self.trainer = Trainer(
                self.job,
                self.data,
                model,
                self.data.new_sizer(),
                second=second,
                to_device=self.device.move_batch,
                new_optimizer=self._new_optimizer,
            )
        if self.job.cfg.compile:
            for loss_fn in self.job.task.losses:
                self._compiled_parts.take_over_attributes(loss_fn)
        tried = self.trainer.tried()
        keep_gradients = None
        if tried.keep_gradients:
            keep_gradients = partial(tried.keep_gradients, rows(1))
        return FakeStep(
            model=self.trainer.models,
            optimizer=tried.optimizer,
            forward_backward=self.forward_backward(rows),
            step=tried.step,
            accumulates=accumulates,
            device=self.device,
            sharding=self.trainer.engine.sharding,
            keep_gradients=keep_gradients,
        )

    def forward_backward(self, rows: MakeRows) -> Callable[[int], object]:
        """Return forward and backward of that many rows, as training runs them."""
        return lambda size: self.trainer.engine.try_rows(rows(size))

    def _build(self) -> tuple[torch.nn.Module, torch.nn.Module | None]:
        """Return the trained model and the second model or None."""
        job = self.job
        kinds: list[tuple[FullModel, DictConfig]] = [(job.builder, job.cfg)]
        if job.second is not None:
            kinds.append((job.second.builder, job.second.cfg))
        models = []
        for builder, cfg in kinds:
            made: list[tuple[torch.nn.Module, str]] = []
            with register_module_parameter_registration_hook(
                lambda module, name, _, made=made: made.append((module, name))
            ):
                model = build_without_weights(
                    cfg, builder, dtype=job.dtype, device=job.device, on_meta=True
                )
            # Some models read the values of their buffers.
            fill = partial(compute_rotary_buffers, model, dtype=job.dtype, device=job.device)
            self.device.move(model, fill=fill)
            if distributed.world_size() == 1:
                kept = {*model.modules()}
                self.device.created += [
                    getattr(module, name) for module, name in made if module in kept
                ]
            self._compiled_parts.take_over_modules(model)
            models.append(model)
        model, *seconds = models
        return model, seconds[0] if seconds else None

    def _new_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        component = str(self.job.cfg.optimizer._component_)
        if component.startswith(_BITSANDBYTES):
            self._leave_out(
                "bitsandbytes: its states are counted by their documented sizes, and paged ones,"
                " which may lie on the host, as if on the device"
            )
            with self.device.mode:
                return StatesOfBitsandbytes(parameters, component)
        with self.device.mode:
            optimizer = self.job.new_optimizer(parameters)
        for sentence in self.device.prepare_optimizer(optimizer):
            self._leave_out(sentence)
        return optimizer


def expected_curve(
    cfg: DictConfig,
    settings: Settings,
    rows: MakeRows,
    *,
    accumulates: bool,
    builder: FullModel | None = None,
) -> MemoryCurve:
    """Return the estimated curve of peaks of trials on the configured device."""
    device = FakeDevice(
        CudaKernels.for_current_device() if str(cfg.device).startswith("cuda") else None
    )
    with own_compiler(cfg):
        run = FakeRun(cfg, settings, device, reads_data=False, builder=builder)
        if run.data.packed and hasattr(attention_utils, "flex_attention"):
            raise SettingError(
                "dataset.packed",
                True,
                "flex attention, which packed rows have here, cannot run on fake tensors",
            )
        try:
            few, more = trace_pair(run.step(rows, accumulates=accumulates))
        finally:
            if run.job.cfg.compile:
                # Variants of fake rows must not use up the compiler's limit for those of real ones.
                torch.compiler.reset()
    return MemoryCurve.from_traces(few, more)


@contextmanager
def _offline() -> Iterator[None]:
    """Context manager: make the libraries that download datasets use local files."""
    import datasets
    from huggingface_hub import constants

    of_datasets = replaced(datasets.config, HF_HUB_OFFLINE=True, HF_DATASETS_OFFLINE=True)
    with replaced(constants, HF_HUB_OFFLINE=True), of_datasets:
        yield


class StatesOfBitsandbytes(torch.optim.Optimizer):
    """States of an optimizer of bitsandbytes, without its step, which needs a device.

    8-bit states have a byte for each element and a float32 for each block of 256; parameters of
    fewer than 4096 elements, and other states, are float32 (bitsandbytes 0.50.2,
    optim/optimizer.py: ``init_state``). An optimizer with two moments has two states.

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
        for parameter in chain.from_iterable(group["params"] for group in self.param_groups):
            state = self.state[parameter]
            if parameter.grad is None or state:
                continue
            is_8bit = self._is_8bit and parameter.numel() >= 4096
            for number in range(self._moments):
                dtype = torch.uint8 if is_8bit else torch.float32
                state[f"state{number}"] = torch.zeros_like(parameter, dtype=dtype)
                if is_8bit:
                    blocks = -(-parameter.numel() // 256)
                    state[f"absmax{number}"] = torch.zeros(blocks, dtype=torch.float32)


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
    """Replacement of `torch` in torchtune's class, with CPU streams and host copies."""

    cuda = SimpleNamespace(
        default_stream=_DefaultStream, Stream=torch.cpu.Stream, stream=torch.cpu.stream
    )
    empty_like = _HostCopy

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


# Its hooks are functions within it, so that they have the same globals.
_init = FunctionType(
    OffloadActivations.__init__.__code__,
    {**OffloadActivations.__init__.__globals__, "torch": _WithoutCUDA()},
    argdefs=OffloadActivations.__init__.__defaults__,
    closure=OffloadActivations.__init__.__closure__,
)


class FakeOffloadActivations(OffloadActivations):  # type: ignore[misc]
    """torchtune's offloading on fake tensors."""

    def __init__(self) -> None:
        # It would warn of this machine's memory.
        _init(self, use_pin_memory=False)


def offloading_fake_tensors() -> AbstractContextManager[None]:
    """Return a context manager: torchtune offloads fake tensors in steps that are set up inside."""
    # The module that makes the context manager of a step.
    offloading = sys.modules[OffloadActivations.__module__]
    return replaced(offloading, OffloadActivations=FakeOffloadActivations)

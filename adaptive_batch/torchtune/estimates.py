"""Estimate of the memory on other devices: the configuration's training step on fake tensors, and
single changes of the configuration.

tune run adaptive_estimate --config NAME estimate.devices=80GiB
    [estimate.sequence_lengths=[1024,2048]] [estimate.world_size=8]
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module

import torch
from omegaconf import DictConfig
from torchtune import modules

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
    check_compiler,
    group_by_kernels,
    left_out,
    needs_values,
    parse_devices,
    rank_changes,
    runs_in_optimizer,
)
from adaptive_batch.memory import auto_headroom

from .checks import (
    TO_PLAN,
    check_parallel,
    complete,
    has_tensor_parallelism,
    without_effect,
)
from .config_errors import instantiate, merged
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
        self._skeleton: torch.nn.Module | None = None

    def lengths(self) -> tuple[tuple[LengthEstimate, ...], tuple[Target, ...], list[str]]:
        """Estimate each length.

        Returns:
            The memory of each length on the first kind of device, the devices with the rows that
            fit, and a sentence for each thing that is not counted.
        """
        estimate_settings = self._settings.estimate
        lengths, devices, run = self._estimate(
            self._cfg, self._wanted, estimate_settings.world_size
        )
        self._skeleton = run.job.skeleton
        not_counted = list(run.left_out)
        if self._settings.micro_batch.needs_search:
            not_counted.append(
                "a step that fits as one micro-batch needs less: gradients of earlier ones are"
                " counted"
            )
        if run.trainer.engine.reference is not None:
            not_counted.append("the reference, which runs before the step with rows of its own")
        architectures = [device.architecture for device in self._devices if self._on_accelerator]
        not_counted += left_out(
            run.trainer.models, architectures, world_size=estimate_settings.world_size
        )
        if not self._on_accelerator:
            not_counted.append(
                f"device={self._cfg.device}: what an accelerator takes beside tensors, and what is"
                " no tensor"
            )
        return lengths, devices, not_counted

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
                rows = [run.rows_of(length)[0] for length in wanted]
                accumulates = settings.search_plan.has_several or settings.micro_batch.needs_search
                step = run.step(rows[0], accumulates=accumulates)
                estimates = [
                    run.estimate(
                        step, length, targets, is_checked=not is_change, allocator=allocator
                    )
                    for length in wanted
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

    def changes(self, length: LengthEstimate, *, fits: bool) -> Iterator[Change]:
        """Estimate each single change at the first length, on each device.

        Args:
            length: estimate of that length without a change.
            fits: whether a row fits on each device without a change.
        """
        options = self._settings.estimate
        maximum = self._settings.probe.maximum
        assert self._skeleton is not None
        changes = candidates(
            self._cfg,
            self._skeleton,
            tokens=length.sequence_length,
            world_size=options.world_size,
        )
        for candidate in changes:
            # More devices than 8 are of interest until a row fits.
            if (candidate.world_size or 0) > 8 and fits:
                break
            try:
                _, devices, _ = self._estimate(
                    with_overrides(self._cfg, candidate.overrides),
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
        ranks_of_a_model = check_parallel(cfg, world_size=world_size)
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
            try:
                yield FakeRun(
                    cfg,
                    Settings.from_config(cfg),
                    fake,
                    reads_data=reads_data,
                    builder=self._builder,
                )
            except Exception as error:
                remedy = needs_values(error)
                if remedy is None:
                    raise
                key = "optimizer" if runs_in_optimizer(error) else "model"
                raise SettingError(key, str(cfg[key]._component_), remedy) from error


# --- single changes

# Optimizers that have a fused step.
_FUSED = ("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD")


@dataclass(frozen=True)
class Candidate:
    """A change to estimate.

    Attributes:
        overrides: arguments that the user types.
        cost: price of the change, for the user.
        sequence_length: length of the rows, if it changes.
        world_size: ranks, if they change.
        allocator: settings of the allocator, if they change.
    """

    overrides: tuple[str, ...]
    cost: str
    sequence_length: int | None = None
    world_size: int | None = None
    allocator: AllocatorSettings | None = None


def candidates(
    cfg: DictConfig, model: torch.nn.Module, *, tokens: int, world_size: int
) -> Iterator[Candidate]:
    """Yield the single changes that apply to a configuration.

    Args:
        cfg: configuration.
        model: model of the configuration; it may be without memory.
        tokens: tokens of a row.
        world_size: ranks that share the model.
    """
    if str(cfg.device) != "cpu" and not AllocatorSettings.from_environment().expandable_segments:
        yield Candidate(
            ("PYTORCH_ALLOC_CONF=expandable_segments:True",),
            "an environment variable; PyTorch's allocator then leaves less of its memory unused",
            allocator=AllocatorSettings(expandable_segments=True),
        )
    half = tokens // 2
    if tokens >= 256:
        overrides = (f"tokenizer.max_seq_len={half}",)
        yield Candidate(overrides, f"rows are cut to {half} tokens", sequence_length=half)
    changes = [*_changes_of_memory(cfg, model), *_changes_of_optimizer(cfg, world_size)]
    if "lora_attn_modules" in cfg.model:
        changes += _changes_of_adapters(cfg.model)
    for applies, changed, cost in changes:
        if applies:
            yield Candidate(tuple(changed), cost)
    for ranks in (2, 4, 8, 16, 32, 64, 128):
        if ranks > world_size:
            cost = f"{ranks} devices, which exchange each layer's parameters; rows of each device"
            yield Candidate((f"--nproc_per_node {ranks}",), cost, world_size=ranks)


# Whether a change applies, its overrides and its cost.
_Changes = list[tuple[bool, Sequence[str], str]]


def _changes_of_memory(cfg: DictConfig, model: torch.nn.Module) -> _Changes:
    """Return changes of what is kept for backward, of the loss and of the dtype."""
    recomputes = cfg.get("enable_activation_checkpointing") or cfg.get("ac_mode") is not None
    is_compiled = bool(cfg.get("compile", False)) and str(cfg.device) != "cpu"
    has_budget = is_compiled and not has_tensor_parallelism(cfg) and check_compiler() is None
    budget = cfg.get("activation_memory_budget", None)
    dtype = str(cfg.dtype)
    loss = str(cfg.loss._component_)
    distils = cfg.get("kd_loss", None) is not None
    chunks = 4 * int(cfg.loss.get("num_output_chunks", 8))
    # All losses take logits in the same chunks.
    losses = ("loss", "kd_loss") if distils else ("loss",)
    return [
        (
            not recomputes,
            ["enable_activation_checkpointing=True"],
            "each layer's forward runs again in backward: up to a third more compute",
        ),
        (
            not recomputes,
            ["ac_mode=selective", "ac_option=2"],
            "every second layer's forward runs again: up to a sixth more compute",
        ),
        # Each is estimated, as a smaller share may need more memory.
        *(
            (
                has_budget and share < (1.0 if budget is None else float(budget)),
                [f"activation_memory_budget={share}"],
                "each compiled part computes in backward what is cheapest to compute again",
            )
            for share in (0.5, 0.3, 0.15)
        ),
        (
            dtype in ("bf16", "bfloat16")
            and any(type(module) is modules.RMSNorm for module in model.modules()),
            ["fused_rms_norm=True"],
            "norms are one operation each: results differ by rounding",
        ),
        (
            loss in ("torch.nn.CrossEntropyLoss", "torchtune.modules.loss.CrossEntropyLoss")
            and not distils,
            ["loss=torchtune.modules.loss.CEWithChunkedOutputLoss"],
            "the same loss, summed in 8 parts",
        ),
        (
            loss.endswith("CEWithChunkedOutputLoss"),
            [f"{name}.num_output_chunks={chunks}" for name in losses],
            f"the same loss, summed in {chunks} parts",
        ),
        (
            dtype in ("fp32", "float32"),
            ["dtype=bf16"],
            "weights, gradients and states with 8 bits of precision: results differ",
        ),
    ]


def _changes_of_optimizer(cfg: DictConfig, world_size: int) -> _Changes:
    """Return changes of the optimizer, its states and its step, and of several ranks."""
    optimizer = str(cfg.optimizer._component_)
    in_backward = ["optimizer_in_bwd=True"]
    if int(cfg.get("gradient_accumulation_steps", 1) or 1) > 1:
        in_backward.append("gradient_accumulation_steps=1")
    if cfg.get("clip_grad_norm", None) is not None:
        in_backward.append("clip_grad_norm=null")
    given = [key for key in ("fused", "foreach") if cfg.optimizer.get(key, None) is not None]
    is_divided = world_size > 1
    return [
        (
            not cfg.get("optimizer_in_bwd", False)
            and not (is_divided and optimizer.startswith("torchao.")),
            in_backward,
            "no accumulation, no clipping, and no retry of a step that runs out of memory",
        ),
        (
            optimizer in ("torch.optim.AdamW", "torch.optim.Adam"),
            [
                f"optimizer=torchao.optim.{optimizer.rpartition('.')[2]}8bit",
                *(f"~optimizer.{key}" for key in given),
            ],
            "the optimizer's states are rounded to 8 bits",
        ),
        (
            optimizer in _FUSED and not any(cfg.optimizer[key] for key in given),
            ["optimizer.fused=True"],
            "the optimizer's step is one kernel: results differ by rounding",
        ),
        (
            is_divided and not cfg.get("fsdp_reshard_after_forward", True),
            ["fsdp_reshard_after_forward=True"],
            "each layer is gathered again in backward",
        ),
        (
            is_divided and cfg.get("sync_gradients_every_micro_batch", None) is False,
            ["sync_gradients_every_micro_batch=True"],
            "gradients are reduced after each micro-batch",
        ),
    ]


def _changes_of_adapters(block: DictConfig) -> _Changes:
    """Return changes of the adapters, and the base in four bits instead of its dtype."""
    module, _, name = str(block._component_).rpartition(".")
    builders = import_module(module)
    takes_base = "quantize_base" in inspect.signature(getattr(builders, name)).parameters
    has_builder = name.startswith("lora_") and hasattr(builders, f"q{name}")
    is_quantized = block.get("quantize_base", False) or name.startswith("qlora_")
    rank = int(block.get("lora_rank", 8))
    quantize = f"model={module}.q{name}" if has_builder else "model.quantize_base=True"
    return [
        (rank > 1, [f"model.lora_rank={rank // 2}"], "adapters of half the rank hold less"),
        (
            bool(block.get("apply_lora_to_mlp", False)),
            ["model.apply_lora_to_mlp=False"],
            "no adapters in the MLP, whose inputs are then not kept",
        ),
        (
            bool({*block.lora_attn_modules} - {"q_proj", "v_proj"}),
            ["model.lora_attn_modules=[q_proj,v_proj]"],
            "adapters of queries and values alone in attention",
        ),
        (
            has_builder or (takes_base and not is_quantized),
            [quantize],
            "the base has 4 bits (NF4): it is rounded, and made whole again in each forward and"
            " backward",
        ),
    ]


def with_overrides(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a configuration with overrides as torchtune's command line takes them."""
    # Arguments of `tune run` and the environment are not keys.
    keys = [override for override in overrides if not override.startswith(("--", "PYTORCH"))]
    changed: DictConfig = merged(cfg, keys)
    return changed

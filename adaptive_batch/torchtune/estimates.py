"""A plan for devices that are not here: the configuration's training step on fake tensors, and what single changes would bring.

tune run adaptive_estimate --config NAME estimate.devices=80GiB [estimate.sequence_lengths=[1024,2048]] [estimate.world_size=8]
"""

from __future__ import annotations

import inspect
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from adaptive_batch import distributed
from adaptive_batch._util import check_whole
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.estimate import (
    Change,
    EstimatedDevice,
    FakeDevice,
    Kinds,
    LengthEstimate,
    MemoryEstimate,
    StepTrace,
    Target,
    fixed_overhead_bytes,
    left_out,
    parse_devices,
    ranked,
    workspace_bytes,
)
from adaptive_batch.memory import Line, MemoryCurve

from .bound import BatchSizeFinder
from .checks import without_effect_on_estimate
from .fake_parts import FEW, MORE, FakeParts, Rows, fake_step, rehearsed
from .keys import load_function
from .ranks import check_parallel
from .requirements import complete
from .settings import Settings

log = logging.getLogger("adaptive_batch")

CHECK = 5  # least rows of the trial that the curve is checked by
COLLATED = 2**29  # bytes that the batch of that trial may take, roughly
PAIRS = ((FEW, MORE), (MORE, 4), (8, 9))

_CANNOT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


def estimate_devices(
    cfg: DictConfig,
    *,
    say: Callable[[str], object] = print,
    save: Callable[[MemoryEstimate], object] = lambda plan: None,
) -> MemoryEstimate:
    """Plan a configuration for the devices that ``estimate.devices`` names, without weights, network or accelerator.

    Args:
        cfg: the configuration: YAML and key=value.
        say: is given the tables as they are ready.
        save: is given the plan as soon as there is one, and again with its changes.

    Raises:
        SettingError: a setting cannot be used, or a component cannot be planned.
    """
    start = time.perf_counter()
    complete(cfg, needs=FakeParts.needs)
    settings = Settings.from_config(OmegaConf.to_container(cfg, resolve=True))
    if distributed.is_launched():
        raise SettingError(
            "estimate.devices",
            settings.estimate.devices,
            "estimate in one process; give ranks by estimate.world_size",
        )
    for key, reason in without_effect_on_estimate(settings):
        say(f"{key} has no effect: {reason}")
    devices = parse_devices(settings.estimate.devices)
    planner = _Planner(cfg, settings, devices)
    lengths, left_out = planner.lengths()
    plan = MemoryEstimate(
        targets=planner.targets,
        lengths=tuple(lengths),
        maximum=settings.probe.maximum,
        world_size=settings.estimate.world_size,
        left_out=tuple(left_out),
        seconds=time.perf_counter() - start,
    )
    save(plan)
    say(f"\n{plan.table()}")
    for sentence in plan.left_out:
        say(f"left out: {sentence}")
    if settings.estimate.changes:
        now = [plan.bound(plan.lengths[0], target) for target in plan.targets]
        tried = list(planner.changes(plan.lengths[0]))
        plan = replace(
            plan,
            changes=ranked(tried, now),
            refused=tuple(change for change in tried if change.refused),
            seconds=time.perf_counter() - start,
        )
        save(plan)
        say(f"\n{plan.table_of_changes() or 'no single change of those that could be planned would let more fit'}")
        for change in plan.refused:
            say(f"not planned: {' '.join(change.overrides)}: {change.refused}")
    return plan


@dataclass(frozen=True)
class _Idea:
    """A change to try: what is typed, what it costs, and the length and ranks that it is planned with where they change."""

    overrides: tuple[str, ...]
    cost: str
    sequence_length: int | None = None
    world_size: int | None = None


class _Planner:
    """Plans one configuration and its variants.

    Args:
        cfg: the configuration.
        settings: the same, checked.
        devices: that are planned for.
    """

    def __init__(self, cfg: DictConfig, settings: Settings, devices: Sequence[EstimatedDevice]) -> None:
        self._cfg = cfg
        self._settings = settings
        self._on_accelerator = not str(cfg.device).startswith("cpu")
        if self._on_accelerator and not str(cfg.device).startswith("cuda"):
            raise SettingError(
                "device", cfg.device, "a plan knows cuda, which ROCm calls itself too, and cpu; give one of them"
            )
        self._devices = devices
        self._first_length: int | str = "longest"
        self._recomputed = 0.0
        self.targets = tuple(self._target(device) for device in devices)

    def _target(self, device: EstimatedDevice) -> Target:
        estimate = self._settings.estimate
        headroom = self._settings.probe.headroom if estimate.headroom is None else estimate.headroom
        taken, free = [], device.total_bytes
        if self._on_accelerator:
            overhead = fixed_overhead_bytes(device.architecture, context_bytes=estimate.context)
            taken.append(("the driver's context and cuBLAS", overhead))
            free = max(0, free - overhead)
        elif estimate.context:
            taken.append(("estimate.context", estimate.context))
            free = max(0, free - estimate.context)
        budget = int(free * (1 - headroom))
        if headroom:
            taken.append((f"headroom ({headroom:.0%})", free - budget))
        return Target(device.describe(), device.total_bytes, budget, tuple(taken), device.source)

    def _workspace(self, operation: Any, args: Sequence[Any], kwargs: Any) -> int:
        return max(
            workspace_bytes(operation, args, kwargs, compute_capability=device.compute_capability)
            for device in self._devices
        )

    def lengths(self) -> tuple[list[LengthEstimate], list[str]]:
        """The plan of each length, and what they leave out."""
        world_size = self._settings.estimate.world_size
        wanted = [self._resolved(length) for length in self._settings.estimate.lengths_of(self._settings.probe)[1]]
        self._first_length = wanted[0]
        with self._step(self._cfg, wanted, world_size) as step:
            plans = [
                step.plan(length, self.targets, checks=number + 1 == len(wanted))
                for number, length in enumerate(wanted)
            ]
            said = list(step.parts.left_out)
            self._recomputed = _share_of_layers(step.parts.skeleton) / 3
            if self._settings.fits_itself:
                said.append("a step that fits as one micro-batch needs less: gradients of earlier ones are counted")
            if self._on_accelerator:
                names = [device.architecture for device in self._devices]
                said += left_out(names, dtype=step.parts.dtype, world_size=world_size)
            else:
                said.append("what is no tensor: Python, libraries, the dataset")
                said.append(f"device={self._cfg.device}: nothing that an accelerator takes besides is counted")
            return plans, said

    def _resolved(self, length: int | str) -> int | str:
        """A length as a number where the configuration alone tells it."""
        if length != "max_seq_len":
            return length
        block = self._cfg.tokenizer
        limit = block.get("max_seq_len", None)
        if "max_seq_len" not in block:
            takes = inspect.signature(load_function(block._component_, key="tokenizer")).parameters
            if "max_seq_len" not in takes:  # only the tokenizer itself can tell
                return length
            limit = takes["max_seq_len"].default
        if limit is None:
            key, lengths = self._settings.estimate.lengths_of(self._settings.probe)
            raise SettingError(
                key,
                length if len(lengths) == 1 else list(lengths),
                "tokenizer.max_seq_len is not set; set it, or give a number of tokens",
            )
        return check_whole("tokenizer.max_seq_len", limit)

    def changes(self, length: LengthEstimate) -> Iterator[Change]:
        """Each single change, planned at a length."""
        for idea in self._ideas(length):
            tokens = idea.sequence_length or self._first_length
            try:
                cfg = _changed(self._cfg, idea.overrides)
                with self._step(cfg, [tokens], idea.world_size or self._settings.estimate.world_size) as step:
                    planned = step.plan(tokens, self.targets, checks=False)
            except Exception as error:  # components refuse each other in many ways; the plan stands without a change
                said = (str(error).splitlines() or [""])[0]
                said = said if isinstance(error, AdaptiveBatchError) else f"{type(error).__name__}: {said}"
                yield Change(idea.overrides, idea.cost, refused=said)
                continue
            yield Change(idea.overrides, idea.cost, tuple(planned.max_rows(t.budget_bytes) for t in self.targets))

    def _ideas(self, length: LengthEstimate) -> Iterable[_Idea]:
        cfg, ranks = self._cfg, self._settings.estimate.world_size
        optimizer = str(cfg.optimizer._component_)
        checkpoints = bool(cfg.get("enable_activation_checkpointing", False)) or cfg.get("ac_mode", None) is not None
        if not checkpoints:
            cost = f"each layer's forward runs again in backward: about {self._recomputed:.0%} more compute"
            yield _Idea(("enable_activation_checkpointing=True",), cost)
            yield _Idea(
                ("ac_mode=selective", "ac_option=2"),
                f"every second layer's forward runs again: about {self._recomputed / 2:.0%} more compute",
            )
        if not cfg.get("optimizer_in_bwd", False) and not (ranks > 1 and optimizer.startswith("torchao.")):
            needed = []
            if int(cfg.get("gradient_accumulation_steps", 1) or 1) > 1:
                needed.append("gradient_accumulation_steps=1")
            if cfg.get("clip_grad_norm", None) is not None:
                needed.append("clip_grad_norm=null")
            yield _Idea(
                ("optimizer_in_bwd=True", *needed),
                "no accumulation, no clipping, and no replay of a step that runs out of memory",
            )
        if optimizer in ("torch.optim.AdamW", "torch.optim.Adam"):
            eight_bit = [f"optimizer=torchao.optim.{optimizer.rpartition('.')[2]}8bit"]
            eight_bit += [
                f"~optimizer.{key}" for key in ("fused", "foreach") if cfg.optimizer.get(key, None) is not None
            ]
            yield _Idea(tuple(eight_bit), "the optimizer's states are rounded to 8 bits")
        loss = str(cfg.loss._component_)
        if loss in ("torch.nn.CrossEntropyLoss", "torchtune.modules.loss.CrossEntropyLoss"):
            yield _Idea(("loss=torchtune.modules.loss.CEWithChunkedOutputLoss",), "the same loss, summed in 8 parts")
        elif loss.endswith("CEWithChunkedOutputLoss"):
            chunks = int(cfg.loss.get("num_output_chunks", 8))
            yield _Idea((f"loss.num_output_chunks={4 * chunks}",), f"the same loss, summed in {4 * chunks} parts")
        if str(cfg.dtype) in ("fp32", "float32"):
            yield _Idea(("dtype=bf16",), "weights, gradients and states with 8 bits of precision: results differ")
        if length.sequence_length >= 256:
            half = length.sequence_length // 2
            yield _Idea((f"tokenizer.max_seq_len={half}",), f"rows are cut to {half} tokens", sequence_length=half)
        if ranks > 1 and not cfg.get("fsdp_reshard_after_forward", True):
            yield _Idea(("fsdp_reshard_after_forward=True",), "each layer is gathered again in backward")
        if ranks > 1 and not self._settings.sync_gradients_every_micro_batch:
            yield _Idea(("sync_gradients_every_micro_batch=True",), "gradients are reduced after each micro-batch")
        for more in (2, 4, 8):
            if more > ranks:
                cost = f"{more} devices, which gather and reduce each layer's parameters; rows of each device"
                yield _Idea((f"--nproc_per_node {more}",), cost, world_size=more)

    @contextmanager
    def _step(self, cfg: DictConfig, lengths: Sequence[int | str], world_size: int) -> Iterator[_PlannedStep]:
        with distributed.fake_process_group(world_size, ranks_of_a_model=check_parallel(cfg, world_size=world_size)):
            settings = Settings.from_config(OmegaConf.to_container(cfg, resolve=True))
            device = FakeDevice(workspace=self._workspace if self._on_accelerator else None)
            reads_data = any(isinstance(length, str) for length in lengths) or cfg.get("collate_fn", None) is not None
            parts = FakeParts(cfg, settings, device, reads_data=reads_data)
            try:
                with warnings.catch_warnings():  # torch's words to itself on bf16 norms
                    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
                    yield _PlannedStep(parts, lengths)
            except Exception as error:
                if not _is_of_fake_tensors(error):
                    raise
                raise _cannot_be_planned(cfg, error) from error


class _PlannedStep:
    """The step of some parts on fake tensors.

    Args:
        parts: nothing of them is built yet.
        lengths: that will be planned.
    """

    def __init__(self, parts: FakeParts, lengths: Sequence[int | str]) -> None:
        self.parts = parts
        parts.build_data()
        bounds = BatchSizeFinder(parts)
        self._rows = {length: self._rows_of(bounds, length) for length in lengths}
        settings = parts.settings
        rows, _ = self._rows[lengths[0]]
        keeps = distributed.world_size() > 1 and not settings.sync_gradients_every_micro_batch
        self._step = fake_step(
            parts,
            rows,
            accumulates=bounds.has_several or settings.fits_itself or settings.gradient_accumulation_steps > 1,
            keep_gradients=(lambda: bounds.keep_gradients(rows(1))) if keeps else None,
        )

    def _rows_of(self, bounds: BatchSizeFinder, length: int | str) -> tuple[Rows, int]:
        if self.parts.reads_data:
            longest_first, tokens = bounds.rows_of(length)

            def rows(count: int) -> list[dict[str, Any]]:  # also more of them than there are
                some = longest_first(min(count, len(self.parts.dataset)))
                return [some[number % len(some)] for number in range(count)]

        else:
            assert isinstance(length, int)
            tokens = length

            def rows(count: int) -> list[dict[str, Any]]:
                return [self.parts.made_up_row(length)] * count

        longest = self.parts.max_seq_len
        if longest and tokens > longest:
            key, _ = self.parts.settings.estimate.lengths_of(self.parts.settings.probe)
            raise SettingError(key, length, f"the model takes {longest} tokens at most")
        return rows, tokens

    def _alike(
        self, run: Callable[[int], object], length: int | str
    ) -> tuple[tuple[int, StepTrace], tuple[int, StepTrace]]:
        """Two sizes that ran the same operations."""
        for few, many in PAIRS:
            low, high = (self._step.trace(size, forward_backward=run) for size in (few, many))
            if low.trace.program == high.trace.program:
                return (few, low), (many, high)
        tried = ", ".join(f"{few} and {many}" for few, many in PAIRS)
        remedy = f"each number of rows runs other operations (tried: {tried}), so no peak follows from another"
        raise SettingError(
            "model", str(self.parts.cfg.model._component_), f"{remedy} at {length} tokens; probe it on a device"
        )

    def plan(self, length: int | str, targets: Sequence[Target], *, checks: bool) -> LengthEstimate:
        """The plan of one length; `checks` it by one more size, whose tensors are attributed to modules."""
        rows, tokens = self._rows[length]
        run = rehearsed(self.parts, rows)
        (fewer, few), (larger, more) = self._alike(run, length)
        curve = MemoryCurve.from_traces((fewer, few.trace), (larger, more.trace))
        checked, held = None, ()
        if checks:
            fitting = [curve.max_rows(target.budget_bytes) or 0 for target in targets]
            # the tokens of a batch are collated for real, which takes time and memory
            most = COLLATED // (128 * tokens)
            size = max(CHECK, min(max(fitting), self.parts.settings.probe.maximum, most))
            third = self._step.trace(size, forward_backward=run, explain={line.operation for line in curve.lines})
            checked = size, max(third.trace.live_bytes), curve.peak_bytes(size)
            held = tuple(third.explained.items())
        one_row = curve.peak_bytes(1)
        if any((curve.max_rows(target.budget_bytes) or 0) < FEW for target in targets):
            one_row = max(self._step.trace(1, forward_backward=run).trace.live_bytes)
        return LengthEstimate(
            sequence_length=tokens,
            resident=self._step.resident,
            curve=curve,
            kinds=tuple(_kinds(line, (fewer, few), (larger, more)) for line in curve.lines),
            one_row_bytes=one_row,
            optimizer_peak_bytes=self._step.optimizer_peak_bytes,
            checked=checked,
            held=held,
        )


def _kinds(line: Line, fewer: tuple[int, StepTrace], larger: tuple[int, StepTrace]) -> Kinds:
    (few, low), (many, high) = fewer, larger
    below, above = low.forward_bytes[line.operation], high.forward_bytes[line.operation]
    each = (above - below) / (many - few)
    return Kinds(line, (below - few * each, each), high.gradient_bytes(line.operation))


def _share_of_layers(model: torch.nn.Module) -> float:
    """The part of a forward's multiplications that is in the layers, by their parameters; a backward has twice as many."""
    sizes = {"layers": 0, "others": 0}
    for name, parameter in model.named_parameters():
        if "embeddings" not in name or not hasattr(model, "output"):  # looking up multiplies nothing
            sizes["layers" if "layers." in name else "others"] += parameter.numel()
    if not isinstance(getattr(model, "output", None), torch.nn.Linear) and hasattr(model, "tok_embeddings"):
        sizes["others"] += model.tok_embeddings.weight.numel()  # a tied output layer
    return sizes["layers"] / max(1, sum(sizes.values()))


def _changed(cfg: DictConfig, overrides: Iterable[str]) -> DictConfig:
    """A configuration with overrides as torchtune's command line takes them."""
    changed = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    assert isinstance(changed, DictConfig)
    for override in overrides:
        if override.startswith("--"):
            continue
        if override.startswith("~"):
            block, _, key = override[1:].rpartition(".")
            OmegaConf.select(changed, block).pop(key)
            continue
        key, _, value = override.partition("=")
        if key in ("optimizer", "loss"):
            key += "._component_"
        OmegaConf.update(changed, key, OmegaConf.from_dotlist([f"value={value}"]).value, force_add=True)
    return changed


def _cannot_be_planned(cfg: DictConfig, error: Exception) -> SettingError:
    """Names the component whose code asked fake tensors for what they do not have, and the operation."""
    key, component = "model", str(cfg.model._component_)
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer):
            key, component = "optimizer", str(cfg.optimizer._component_)
        elif (
            isinstance(owner, torch.nn.Module) and type(owner).__name__ == str(cfg.loss._component_).rpartition(".")[2]
        ):
            key, component = "loss", str(cfg.loss._component_)
        trace = trace.tb_next
    operation = getattr(error, "func", None) or str(error).partition("\n")[0]
    return SettingError(
        key,
        component,
        f"it cannot be planned on fake tensors: {operation} ({type(error).__name__}) needs values, and there are none; "
        "probe it on a device",
    )


def _is_of_fake_tensors(error: Exception) -> bool:
    words = ("FakeTensor", "not supported for tensor subclasses")
    return isinstance(error, _CANNOT) or (
        isinstance(error, AssertionError | RuntimeError) and any(word in str(error) for word in words)
    )

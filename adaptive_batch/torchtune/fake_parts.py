"""The parts of a run on fake tensors: the model, data and optimizer of a configuration, without weights, files or a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.utils._python_dispatch import _disable_current_modes
from torchtune import config
from torchtune.modules.attention_utils import _SUPPORTS_FLEX_ATTENTION

from adaptive_batch import distributed
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.estimate import FakeDevice, FakeStep, workspace_bytes
from adaptive_batch.memory import MemoryCurve

from .model import ModelBuilder
from .parts import TrainingParts
from .requirements import TO_PLAN, told
from .settings import Settings
from .sharded import Weights, apply_checkpointing, build_sharded, compute_rotary_buffers

log = logging.getLogger("adaptive_batch")

Rows = Callable[[int], list[dict[str, Any]]]

FEW, MORE = 2, 3  # rows of the trials that tell the curve; one row alone often runs other operations

_COMPILED_OPTIMIZERS = "torchao."
_BITSANDBYTES = "bitsandbytes."


class FakeParts(TrainingParts):
    """What :class:`TrainingParts` builds, on a :class:`FakeDevice`.

    Args:
        cfg: the recipe's configuration, for the device that it names.
        settings: the same, checked.
        device: where everything is put.
        reads_data: take rows from the configured dataset; False makes rows of any length, and reads no file.
        builder: builds the model; None for full fine-tuning.

    Attributes:
        left_out: what is not counted as it would be on the device, a sentence each.

    Raises:
        SettingError: something is configured that cannot be counted on fake tensors.
    """

    needs: ClassVar[Sequence[str]] = TO_PLAN

    def __init__(
        self,
        cfg: DictConfig,
        settings: Settings,
        device: FakeDevice,
        *,
        reads_data: bool,
        builder: ModelBuilder | None = None,
    ) -> None:
        self.fake = device
        self.left_out: list[str] = []
        self.on_accelerator = not str(cfg.device).startswith("cpu")
        self.reads_data = reads_data
        super().__init__(self._eager_on_cpu(cfg), settings, builder)

    def _eager_on_cpu(self, cfg: DictConfig) -> DictConfig:
        """The configuration with what fake tensors on a CPU can run, and what that leaves out."""
        on_cpu = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
        assert isinstance(on_cpu, DictConfig)
        on_cpu.device = "cpu"
        if on_cpu.get("fsdp_cpu_offload", False):
            remedy = "an estimate does not know what is on the host and what on the device; estimate with False, which needs more"
            raise SettingError("fsdp_cpu_offload", True, remedy)
        if on_cpu.get("enable_activation_offloading", False):
            if not on_cpu.get("enable_activation_checkpointing", False):
                raise SettingError(
                    "enable_activation_offloading", True, "it needs enable_activation_checkpointing=True"
                )
            on_cpu.enable_activation_offloading = False
            self.left_out.append(
                "enable_activation_offloading: what each layer keeps is counted on the device, so more fits than is said"
            )
        if on_cpu.get("compile", False):
            on_cpu.compile = False
            self.left_out.append(
                "compile: the eager program is counted, which holds more than a compiled one as a rule"
            )
        return on_cpu

    def _leave_out(self, sentence: str) -> None:
        if sentence not in self.left_out:
            self.left_out.append(sentence)

    # --- data -------------------------------------------------------------------------------------------------------

    def build_data(self) -> None:
        """The loss, and rows: of the dataset, or made up."""
        if self.reads_data:
            self._read_what_is_at_hand()
        else:
            self.check_all_is_trained()
            self.loss_fn = config.instantiate(self.cfg.loss)
            blocks = self.cfg.dataset
            self.packed = any(
                block.get("packed", False) for block in (blocks if isinstance(blocks, ListConfig) else [blocks])
            )
            self._packed_val = False
            self._choose_collate(pad_id=0)
            self._pack_filler = 0
            self.dataset = [self.made_up_row(8)]
        if self.packed and self.on_accelerator:
            self._leave_out("flex attention: packed rows are counted with a mask of tokens x tokens, and it needs less")
        real = self.collate

        def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
            with _disable_current_modes():
                return self._collate_packed(rows) if self.packed else real(rows)

        self.collate = collate

    def _collate_packed(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What torchtune makes of packed rows: the mask, of tokens x tokens for each, is fake from the start, and takes no memory."""
        batch = {key: torch.stack([row[key] for row in rows]) for key in ("tokens", "labels", "input_pos")}
        count, tokens = batch["tokens"].shape
        with self.fake.mode:
            batch["mask"] = torch.empty(count, tokens, tokens, dtype=torch.bool)
        return batch

    def _build_tokenizer(self) -> Any:
        return config.instantiate(self.cfg.tokenizer)  # one that is not there is one reason more to give lengths

    def _read_what_is_at_hand(self) -> None:
        try:
            with _offline():
                super().build_data()
        except AdaptiveBatchError:
            raise
        except Exception as error:  # the tokenizer's and the dataset's own libraries have many
            key, lengths = self.settings.estimate.lengths_of(self.settings.probe)
            collate = self.cfg.get("collate_fn", None)
            why = f"not at hand ({type(error).__name__}: {told(error)})"
            if collate is not None and not any(isinstance(length, str) for length in lengths):
                remedy = (
                    f"it is called on rows of the dataset, which are {why}; remove it to estimate rows of text alone"
                )
                raise SettingError("collate_fn", collate, remedy) from error
            remedy = f"the rows that should tell their length are {why}; give lengths, such as estimate.sequence_lengths=[512,1024,2048]"
            raise SettingError(
                key,
                lengths[0] if len(lengths) == 1 else list(lengths),
                remedy + ("" if collate else ", and no file is read"),
            ) from error

    def made_up_row(self, tokens: int) -> dict[str, Any]:
        """A row of text of that many tokens, each with a label."""
        if not self.packed:
            return {"tokens": [0] * tokens, "labels": [0] * tokens}
        row = torch.zeros(tokens, dtype=torch.int64)
        return {
            "tokens": row,
            "labels": row,
            "input_pos": torch.arange(tokens),
            "seq_lens": torch.tensor([tokens]),
        }

    def to_device(self, batch: dict[str, Any]) -> None:
        self.fake.batch(batch)

    # --- model and optimizer ----------------------------------------------------------------------------------------

    def _build(self, weights: Weights | None = None) -> torch.nn.Module:
        if distributed.world_size() > 1:
            model = build_sharded(self.cfg, dtype=self.dtype, device=self.device)
        else:
            model = self.builder.skeleton(self.cfg, dtype=self.dtype)
            apply_checkpointing(model, self.cfg)
        self.builder.freeze(model)
        compute_rotary_buffers(model, dtype=self.dtype, device=self.device)  # some look at their values
        self.fake.move(model)
        if any(isinstance(module, torch.nn.RNNBase) for module in model.modules()):
            self._leave_out(
                "recurrent layers: their fused kernels keep what fake tensors do not show, so a step needs more"
            )
        if self.on_accelerator:  # its kernels keep no weights of attention for dropout, and a CPU's would
            for module in model.modules():
                if isinstance(getattr(module, "attn_dropout", None), float):
                    cast(Any, module).attn_dropout = 0.0
        return model

    def _new_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        component = str(self.cfg.optimizer._component_)
        if component.startswith(_BITSANDBYTES):
            self._leave_out(
                "bitsandbytes: its states by their documented sizes, paged ones as if they stayed on the device"
            )
            with self.fake.mode:
                return StatesOfBitsandbytes(parameters, component)
        if component.startswith(_COMPILED_OPTIMIZERS):
            from torchao.optim import subclass_4bit, subclass_8bit

            for states in (subclass_4bit, subclass_8bit):  # tables that are looked into when they are made, and kept
                states.get_qmap_signed()
                states.get_qmap_unsigned()
        with self.fake.mode:
            optimizer = super()._new_optimizer(parameters)
        is_plain = all(optimizer.defaults.get(key) is None for key in ("fused", "foreach"))
        if (
            self.on_accelerator
            and component.startswith("torch.optim.")
            and is_plain
            and "foreach" in optimizer.defaults
        ):
            for group in optimizer.param_groups:  # what torch takes there
                group["foreach"] = True
        if component.startswith(_COMPILED_OPTIMIZERS) and self.on_accelerator:
            self._leave_out("torchao: its step is compiled on a device, so only the states that it keeps are counted")
            optimizer.step = _uncounted(self.fake, optimizer.step)  # type: ignore[method-assign]
        return optimizer


class NoWeights:
    """Stands for weights where the model is built without them."""

    is_divided = False

    def load_weights(self) -> Mapping[str, Any]:
        """Return none."""
        return {}

    def load_divided(self, model: torch.nn.Module) -> None:
        """Load none."""


def fake_step(
    parts: FakeParts, rows: Rows, *, accumulates: bool, keep_gradients: Callable[[], object] | None = None
) -> FakeStep:
    """The step that training with these parts runs, on fake tensors.

    Args:
        parts: with their data built.
        rows: gives that many rows.
        accumulates, keep_gradients: as in :class:`FakeStep`.
    """
    parts.build_model(NoWeights())
    parts.build_optimizer()
    return FakeStep(
        model=parts.model,
        optimizer=parts.in_backward or parts.optimizer,
        forward_backward=rehearsed(parts, rows),
        step=parts.rehearse_step,
        accumulates=accumulates,
        device=parts.fake,
        sharding=parts.accumulator.sharding,
        keep_gradients=keep_gradients,
    )


def rehearsed(parts: FakeParts, rows: Rows) -> Callable[[int], object]:
    """Forward and backward of that many rows, as training runs them."""
    return lambda size: parts.accumulator.try_rows(rows(size))


def expected_curve(
    cfg: DictConfig, settings: Settings, rows: Rows, *, accumulates: bool, builder: ModelBuilder | None = None
) -> MemoryCurve:
    """What trials of these rows should peak at on the configured device."""
    capability = torch.cuda.get_device_capability() if str(cfg.device).startswith("cuda") else None
    workspace = partial(workspace_bytes, compute_capability=capability)
    parts = FakeParts(cfg, settings, FakeDevice(workspace=workspace), reads_data=False, builder=builder)
    parts.build_data()
    if parts.packed and _SUPPORTS_FLEX_ATTENTION:
        raise SettingError(
            "dataset.packed", True, "flex attention, which packed rows have here, cannot run on fake tensors"
        )
    step = fake_step(parts, rows, accumulates=accumulates)
    few, more = (step.trace(size) for size in (FEW, MORE))
    return MemoryCurve.from_traces((FEW, few.trace), (MORE, more.trace))


@contextmanager
def _offline() -> Iterator[None]:
    """Inside, the libraries that fetch datasets take what is on the disk."""
    import datasets
    from huggingface_hub import constants

    places = (
        (constants, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_DATASETS_OFFLINE"),
    )
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)


class StatesOfBitsandbytes(torch.optim.Optimizer):
    """The states that an optimizer of bitsandbytes makes, and no step: it cannot be run on fake tensors.

    8-bit ones hold a byte for each element and a float32 for each block of 256 of them, parameters of fewer than 4096 elements
    float32; others hold float32 (bitsandbytes 0.50.2, optim/optimizer.py: ``init_state``). There are two states where there are
    two moments, else one.

    Raises:
        SettingError: an optimizer whose states are not known.
    """

    _MOMENTS: ClassVar[dict[str, int]] = {"AdamW": 2, "Adam": 2, "Lion": 1, "SGD": 1, "RMSprop": 1, "Adagrad": 1}

    def __init__(self, parameters: Iterable[torch.nn.Parameter], component: str) -> None:
        name = component.rpartition(".")[2].removeprefix("Paged")
        kind = name.removesuffix("8bit").removesuffix("32bit")
        if kind not in self._MOMENTS:
            remedy = (
                f"the size of its states is not known; estimate with one of {', '.join(self._MOMENTS)} of bitsandbytes"
            )
            raise SettingError("optimizer._component_", component, remedy)
        self._moments = self._MOMENTS[kind]
        self._is_8bit = name.endswith("8bit")
        super().__init__(parameters, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            for number in range(self._moments):
                self._make_state(parameter, number)

    def _make_state(self, parameter: torch.Tensor, number: int) -> None:
        state = self.state[parameter]
        if f"state{number}" in state:
            return
        is_8bit = self._is_8bit and parameter.numel() >= 4096
        state[f"state{number}"] = torch.zeros_like(parameter, dtype=torch.uint8 if is_8bit else torch.float32)
        if is_8bit:
            state[f"absmax{number}"] = torch.zeros(-(-parameter.numel() // 256), dtype=torch.float32)


def _uncounted(device: FakeDevice, step: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with device.uncounted():
            return step(*args, **kwargs)

    return run

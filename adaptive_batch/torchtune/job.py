"""Context of a run: checked configuration, task, device, dtype, and models on the meta device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig
from torchtune import training, utils

from adaptive_batch import distributed
from adaptive_batch._torch import PrivateNames
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.memory import DeviceMemory, check_segments, device_memory

from .checks import TO_TRAIN, complete
from .configuration import component_of, instantiate, refusing
from .model import FullModel, SecondModel, builder_of, num_token_embeddings
from .settings import Settings
from .task import Distillation, NextTokens, PreferencePairs, Task, takes_pairs

private = PrivateNames("compiled steps")

log = logging.getLogger("adaptive_batch")
T = TypeVar("T")


class Job:
    """Context that the parts of a run share.

    Args:
        cfg: configuration; torchtune's defaults are filled in.
        settings: its keys, checked.
        builder: builder of the model; None for that of the configuration.
        task: task of the run; None for the task of the loss.
        needs: keys that must be set.
        with_values: wrapper of functions that make batches. Runs on fake tensors give one that lets
            them make real tensors.

    Attributes:
        ranks: data-parallel size at the start of the run; batches are counted on it.

    Raises:
        SettingError: a key is missing or another recipe's, or the device or dtype cannot be used.
    """

    def __init__(
        self,
        cfg: DictConfig,
        settings: Settings,
        builder: FullModel | None = None,
        *,
        task: type[Task] | None = None,
        needs: Sequence[str] = TO_TRAIN,
        with_values: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda make: make,
    ) -> None:
        complete(cfg, needs=needs)
        self.cfg = cfg
        self.settings = settings
        self.builder = builder or builder_of(cfg)
        self.with_values = with_values
        self.ranks = distributed.data_parallel_size()
        with refusing("device", cfg.device, "give cuda or cpu", problem="it cannot be used"):
            self.device = utils.get_device(device=cfg.device)
        # torchtune falls back to the CPU if the configured device is missing. Training there would
        # take forever, so refuse.
        configured_type = str(cfg.device).partition(":")[0]
        is_other = cfg.device is not None and self.device.type != configured_type
        if is_other or self.device.type == "meta":
            remedy = (
                f"torch {torch.__version__} sees no such device (`adaptive-batch check` shows why);"
                " give cuda, or cpu with dtype=fp32"
            )
            raise SettingError("device", cfg.device, remedy)
        check_segments(self.device)
        with refusing("dtype", cfg.dtype, "give bf16 or fp32", problem="it cannot be used"):
            self.dtype = training.get_dtype(cfg.dtype, self.device)
        if cfg.compile:
            # By default, torch compiles the first shape as static and compiles again for the
            # second. If micro-batches have many shapes, compile with dynamic shapes from the start.
            has_many_shapes = settings.chooses_fastest or settings.layout_kind != "padded"
            _set_compiler(settings.activation_memory_budget, is_static=not has_many_shapes)
        self.loss_fn = instantiate("loss", cfg.loss)
        self.task = (task or task_of(cfg, self.loss_fn))(cfg, self.loss_fn)

    def check_model(self) -> None:
        """Raise SettingError for a loss or a model of another recipe.

        A model that cannot be built on the meta device is checked after it is built.
        """
        # The loss is checked even if the model cannot be built here.
        self.task.check_loss()
        check_keys_of_others(self.cfg, type(self.task))
        model, second = self._meta_models
        if model is not None:
            self.builder.check(model, self.cfg)
            self.task.check_models(model, second)

    @cached_property
    def second(self) -> SecondModel | None:
        """Frozen second model of the task, or None."""
        return self.task.second_model(has_frozen_base=self.builder.has_frozen_base)

    @cached_property
    def memory(self) -> DeviceMemory:
        """Memory of the device, shared by the ranks of this machine."""
        return device_memory(self.device, shared_by=distributed.local_world_size())

    @cached_property
    def skeleton(self) -> torch.nn.Module:
        """Model on the meta device."""
        return self.builder.skeleton(self.cfg, dtype=self.dtype)

    @cached_property
    def _meta_models(self) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
        """Model and second model on the meta device, each None if it cannot be built there."""
        return (
            _built_or_none(lambda: self.skeleton),
            _built_or_none(lambda: self.second.skeleton(dtype=self.dtype) if self.second else None),
        )

    @cached_property
    def max_seq_len(self) -> int | None:
        """Most tokens of a sequence that all models take; None if unknown."""
        # The text model of a multimodal model is its `decoder`.
        limits = [
            getattr(getattr(model, "decoder", model), "max_seq_len", None)
            for model in self._meta_models
        ]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def max_row_length(self) -> int | None:
        """Most tokens of a row; None if unknown."""
        if self.max_seq_len is None:
            return None
        return self.max_seq_len * len(self.task.fields)

    @cached_property
    def vocab_size(self) -> int | None:
        """Number of token ids with an embedding; None if unknown."""
        model, _ = self._meta_models
        return None if model is None else num_token_embeddings(model)

    def optimizer_of_one_weight(self) -> torch.optim.Optimizer:
        """Build the configured optimizer for a single weight, without a model.

        Raises:
            SettingError: it cannot be built, or is an optimizer of torch whose step fails.
        """
        weight = torch.nn.Parameter(torch.zeros(1, 1, dtype=self.dtype, device=self.device))
        optimizer = self.new_optimizer([weight])
        # Do not step optimizers of other libraries: some compile their step, which takes long.
        if type(optimizer).__module__.startswith("torch.optim."):
            weight.grad = torch.zeros_like(weight)
            with refusing(
                "optimizer",
                self.cfg.optimizer._component_,
                "give torch.optim.AdamW",
                problem="its step fails",
            ):
                optimizer.step()
        return optimizer

    def new_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Build the configured optimizer of some parameters."""
        optimizer: torch.optim.Optimizer = instantiate("optimizer", self.cfg.optimizer, parameters)
        return optimizer


def _set_compiler(activation_memory_budget: float, *, is_static: bool) -> None:
    """Set the compiler's options. torch keeps them for each thread, so training has to run in the
    thread that calls this function.
    """
    functorch_config = private("torch._functorch.config", "activation_memory_budget")
    if functorch_config.activation_memory_budget != activation_memory_budget:
        # Drop the graphs that were compiled with another budget: they would be reused.
        torch.compiler.reset()
    functorch_config.activation_memory_budget = activation_memory_budget
    torch.compiler.config.assume_static_by_default = is_static


@contextmanager
def restored_compiler() -> Iterator[None]:
    """Context manager: restore the compiler's options that a :class:`Job` sets."""
    functorch_config = private("torch._functorch.config", "activation_memory_budget")
    budget = functorch_config.activation_memory_budget
    is_static = torch.compiler.config.assume_static_by_default
    try:
        yield
    finally:
        _set_compiler(budget, is_static=is_static)


def task_of(cfg: DictConfig, loss_fn: Any) -> type[Task]:
    """Return the task of a configuration, by its loss and its teacher."""
    if takes_pairs(loss_fn):
        return PreferencePairs
    return NextTokens if cfg.get("teacher_model") is None else Distillation


def check_keys_of_others(cfg: DictConfig, task: type[Task]) -> None:
    """Raise SettingError for a key of another task. The message names that task's recipe."""
    for owner in (PreferencePairs, Distillation):
        for key in owner.keys:
            value = cfg.get(key)
            if value is not None and key not in task.keys:
                raise SettingError(key, component_of(value), f"{owner.recipe_hint}; remove it")


def _built_or_none(build: Callable[[], T]) -> T | None:
    """Return a model on the meta device, or None if it cannot be built there."""
    try:
        return build()
    except Exception as error:
        # A RuntimeError of torch means that an operation does not run on the meta device. Any other
        # cause of a SettingError is a mistake in the configuration.
        is_torch_error = isinstance(error.__cause__, RuntimeError)
        if isinstance(error, AdaptiveBatchError) and not is_torch_error:
            raise
        log.debug("the model cannot be built without memory: %s", error)
        return None

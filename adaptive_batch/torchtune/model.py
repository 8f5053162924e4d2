"""What differs between kinds of fine-tuning: how the model is built, which of its parameters train, what is saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from omegaconf import DictConfig
from torchtune import config, training
from torchtune.config._errors import InstantiationError

from adaptive_batch import distributed
from adaptive_batch.errors import SettingError

from .checks import check_all_is_trained
from .config_errors import one_line
from .sharded import Weights, apply_checkpointing, build_sharded, load_sharded


class ModelBuilder(Protocol):
    """Builds the model of one kind of fine-tuning. Data, probe, loop and checkpoints are the same for all kinds."""

    def check(self, model: torch.nn.Module, cfg: DictConfig) -> None:
        """Refuse a model that belongs to another kind of fine-tuning.

        Args:
            model: perhaps without memory.
            cfg: the recipe's configuration.

        Raises:
            SettingError: naming the key, and the recipe that fits.
        """

    def skeleton(self, cfg: DictConfig, *, dtype: torch.dtype) -> torch.nn.Module:
        """Return the model without memory, on the meta device."""

    def build(self, cfg: DictConfig, weights: Weights, *, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        """Return the model with its weights on its device, divided where there are several ranks."""

    def freeze(self, model: torch.nn.Module) -> None:
        """Freeze the parameters that do not train; :meth:`build` calls it, and what estimates the memory of a step."""

    def trained(self, model: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
        """Return the parameters that the optimizer steps; all others are frozen."""

    def to_save(self, model: torch.nn.Module, *, device: torch.device) -> Mapping[str, Any]:
        """Return what a checkpoint of an epoch holds, on rank zero and its host; a collective."""


class FullModel:
    """Full fine-tuning: every parameter trains, and a checkpoint holds the whole model."""

    def check(self, model: torch.nn.Module, cfg: DictConfig) -> None:
        """Refuse a model with adapters."""
        check_all_is_trained(model, cfg)

    def skeleton(self, cfg: DictConfig, *, dtype: torch.dtype) -> torch.nn.Module:
        """Return the model without memory, on the meta device."""
        try:
            with torch.device("meta"), training.set_default_dtype(dtype):
                model: torch.nn.Module = config.instantiate(cfg.model)
        except InstantiationError as error:  # its module cannot be imported
            raise SettingError("model", str(cfg.model._component_), one_line(error)) from error
        return model

    def build(self, cfg: DictConfig, weights: Weights, *, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        """Return the model with its weights on its device, compiled and checkpointed as configured."""
        if distributed.world_size() > 1:
            model = build_sharded(cfg, dtype=dtype, device=device)
            load_sharded(model, weights, cfg, dtype=dtype, device=device)
            self.freeze(model)
            return model
        state = weights.load_weights()
        with training.set_default_dtype(dtype), device:
            model = config.instantiate(cfg.model)
        assert isinstance(model, torch.nn.Module)
        self.check(model, cfg)
        if cfg.compile:
            training.compile_model(model)
        apply_checkpointing(model, cfg)
        model.load_state_dict(state)
        self.freeze(model)
        return model

    def freeze(self, model: torch.nn.Module) -> None:
        """Freeze nothing."""

    def trained(self, model: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
        """Return all parameters."""
        return model.parameters()

    def to_save(self, model: torch.nn.Module, *, device: torch.device) -> Mapping[str, Any]:
        """Return the whole model's state dict."""
        if distributed.world_size() == 1:
            return model.state_dict()
        state: Mapping[str, Any] = training.gather_cpu_state_dict(model, distributed.is_rank_zero(), device=device)
        return state

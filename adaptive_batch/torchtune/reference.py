"""The frozen model that a task compares with: the base of adapters, or a second model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config, training
from torchtune.modules.peft import disable_adapter

from adaptive_batch import distributed
from adaptive_batch.errors import SettingError

from .checks import has_tensor_parallelism
from .config_errors import building
from .model import FullModel, Weights

_REMEDY = "give a block like checkpointer, with the files of this model"


class Reference:
    """The frozen model of a task that compares with one.

    Args:
        policy: the model that trains.
        second: a frozen model; None for the policy with its adapters disabled.

    Attributes:
        second: as given.
    """

    def __init__(self, policy: torch.nn.Module, second: torch.nn.Module | None = None) -> None:
        self._policy = policy
        self.second = second
        if second is not None:
            second.requires_grad_(False)
            second.eval()

    @torch.no_grad()
    def logits(self, **batch: Any) -> torch.Tensor | list[torch.Tensor]:
        """Return the reference's logits of a batch; a list where it returns chunks."""
        logits: torch.Tensor | list[torch.Tensor]
        if self.second is None:
            with disable_adapter(self._policy):
                logits = self._policy(**batch)
            return logits
        # torchtune's teacher keeps its mark on one device: torch chooses the kernel of a chunk's
        # product by it, and their bits differ.
        self.second.requires_grad_(distributed.world_size() == 1)
        try:
            logits = self.second(**batch)
        finally:
            self.second.requires_grad_(False)
        return logits

    @property
    def models(self) -> torch.nn.Module:
        """Both models as one module, or the policy where it is its own reference."""
        if self.second is None:
            return self._policy
        return torch.nn.ModuleList([self._policy, self.second])


class SecondModel:
    """A frozen model that is held beside the one that trains, as configured.

    Args:
        cfg: the recipe's configuration.
        key: key of the block that it is built by; `model` where it is of that kind, too.
        checkpointer_key: key of the block that its weights are loaded by.

    Attributes:
        builder: builds it.
        cfg: the configuration that the builder is given: nothing of it is recomputed.

    Raises:
        SettingError: the models would be divided by tensor parallelism.
    """

    builder: ClassVar[FullModel] = FullModel()

    def __init__(self, cfg: DictConfig, *, key: str = "model", checkpointer_key: str) -> None:
        if has_tensor_parallelism(cfg):
            remedy = (
                "a second model is not divided by tensor parallelism; give 1, and ranks divide both"
                " models by FSDP"
            )
            raise SettingError("tensor_parallel_dim", cfg.tensor_parallel_dim, remedy)
        self._key = key
        self._checkpointer_key = checkpointer_key
        own = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
        assert isinstance(own, DictConfig)
        own.model = own[key]
        own.checkpointer = own[checkpointer_key]
        own.enable_activation_checkpointing = False
        own.ac_mode = None
        self.cfg = own

    def skeleton(self, *, dtype: torch.dtype) -> torch.nn.Module:
        """Return the model without memory, on the meta device."""
        with self._naming_key():
            return self.builder.skeleton(self.cfg, dtype=dtype)

    def loading(self) -> Callable[..., torch.nn.Module]:
        """Find the files of its weights; return what builds the model with them, of a dtype and a
        device.

        Raises:
            SettingError: the checkpointer cannot be built, as where a file is missing.
        """
        weights = _WholeWeights(self.cfg.checkpointer, key=self._checkpointer_key)
        return partial(self._build, weights)

    def _build(
        self, weights: _WholeWeights, *, dtype: torch.dtype, device: torch.device
    ) -> torch.nn.Module:
        with self._naming_key():
            return self.builder.build(self.cfg, weights, dtype=dtype, device=device)

    @contextmanager
    def _naming_key(self) -> Iterator[None]:
        """Name the key of this model in what is refused inside."""
        try:
            yield
        except SettingError as error:
            name, dot, rest = error.key.partition(".")
            if name != "model" or self._key == "model":
                raise
            named = f"{self._key}{dot}{rest}"
            raise SettingError(named, error.value, error.remedy) from error.__cause__


class _WholeWeights(Weights):
    """Loads the weights of a second model, as torchtune's checkpointer reads them.

    Args:
        block: block of the checkpointer.
        key: its key.
    """

    def __init__(self, block: DictConfig, *, key: str) -> None:
        self._block = block
        self._key = key
        # None on other ranks, where nothing asks it.
        self._checkpointer: Any = distributed.on_rank_zero(self._build)

    def _build(self) -> Any:
        with building(self._key, self._block.get("_component_"), _REMEDY):
            return config.instantiate(self._block, should_load_recipe_state=False)

    def load_weights(self) -> Mapping[str, Any]:
        """Return the state dict on rank zero; empty on others."""

        def load() -> Mapping[str, Any]:
            with building(self._key, self._block.get("_component_"), _REMEDY):
                weights: Mapping[str, Any] = self._checkpointer.load_checkpoint()
            return weights[training.MODEL_KEY]  # type: ignore[no-any-return]

        return distributed.on_rank_zero(load) or {}

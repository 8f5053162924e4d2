"""The reference that preferences are trained against: the base of adapters, or a second model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config, training
from torchtune.modules.peft import disable_adapter

from adaptive_batch import distributed
from adaptive_batch.errors import SettingError

from .config_errors import building

KEY = "ref_checkpointer"
_REMEDY = "give the block of checkpointer, with the files of the reference"


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
            # Log probabilities of the two are compared.
            training.disable_dropout(policy)
            training.disable_dropout(second)

    @torch.no_grad()
    def logits(self, **batch: Any) -> torch.Tensor:
        """Return the reference's logits of a batch."""
        if self.second is not None:
            return cast(torch.Tensor, self.second(**batch))
        with disable_adapter(self._policy):
            return cast(torch.Tensor, self._policy(**batch))

    @property
    def models(self) -> torch.nn.Module:
        """Both models as one module, or the policy where it is its own reference."""
        if self.second is None:
            return self._policy
        return torch.nn.ModuleList([self._policy, self.second])


def reference_config(cfg: DictConfig) -> DictConfig:
    """Return the configuration that a second model is built by: nothing of it is recomputed."""
    plain = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    assert isinstance(plain, DictConfig)
    plain.enable_activation_checkpointing = False
    plain.ac_mode = None
    return plain


def check_reference(cfg: DictConfig, *, is_compared: bool, is_second: bool) -> None:
    """Refuse a checkpoint of a reference where there is none, or none where one is needed.

    Args:
        cfg: the recipe's configuration.
        is_compared: whether the task compares with a reference.
        is_second: whether that is a model of its own.
    """
    given = cfg.get(KEY)
    if is_second and given is None:
        problem = "every weight is trained here, and the reference is a model of its own"
        raise SettingError(KEY, None, f"{problem}; {_REMEDY}")
    if given is None or is_second:
        return
    remedy = "there are no preferences to train on here, which `tune run adaptive_dpo` does"
    if is_compared:
        remedy = "the reference of adapters is their base, with adapters disabled"
    raise SettingError(KEY, given.get("_component_"), f"{remedy}; remove it")


class ReferenceWeights:
    """Loads the weights of ``ref_checkpointer``, as torchtune's checkpointer reads them.

    Args:
        cfg: the recipe's configuration.

    Raises:
        SettingError: the checkpointer cannot be built, as where a file is missing.
    """

    is_divided = False

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        # None on other ranks, where nothing asks it.
        self._checkpointer: Any = distributed.on_rank_zero(self._build)

    def _build(self) -> Any:
        block = self._cfg[KEY]
        with building(KEY, block.get("_component_"), _REMEDY):
            return config.instantiate(block, should_load_recipe_state=False)

    def load_weights(self) -> Mapping[str, Any]:
        """Return the state dict on rank zero; empty on others."""

        def load() -> Mapping[str, Any]:
            with building(KEY, self._cfg[KEY].get("_component_"), _REMEDY):
                weights: Mapping[str, Any] = self._checkpointer.load_checkpoint()
            return weights[training.MODEL_KEY]  # type: ignore[no-any-return]

        return distributed.on_rank_zero(load) or {}

    def load_adapters(self) -> Mapping[str, torch.Tensor]:
        """Return none: a reference has no adapters."""
        return {}

    def load_divided(self, state: Mapping[str, torch.Tensor]) -> None:
        """Never called: no rank has saved its part of a reference."""
        raise AssertionError("a reference is loaded as a whole")

"""What every part of a run is built from: the checked configuration, the device, the dtype and the model without memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from omegaconf import DictConfig
from torchtune import config, training, utils

from adaptive_batch import distributed
from adaptive_batch.errors import AdaptiveBatchError, SettingError

from .model import FullModel, ModelBuilder
from .requirements import TO_TRAIN, check_loss, complete, told
from .settings import Settings
from .sharded import check_names

log = logging.getLogger("adaptive_batch")


class Job:
    """The configuration of a run.

    Args:
        cfg: the recipe's configuration; torchtune's defaults are filled in, in place.
        settings: the same, checked.
        builder: builds the model; None for full fine-tuning.
        needs: keys that must be there.

    Attributes:
        ranks: that a batch is counted on, as many as saw different rows when the run began.

    Raises:
        SettingError: a key is missing or another recipe's, or a device, dtype, loss or offloading setting cannot be used.
    """

    def __init__(
        self,
        cfg: DictConfig,
        settings: Settings,
        builder: ModelBuilder | None = None,
        *,
        needs: Sequence[str] = TO_TRAIN,
    ) -> None:
        complete(cfg, needs=needs)
        check_names(cfg)
        self.cfg, self.settings, self.builder = cfg, settings, builder or FullModel()
        self.ranks = distributed.data_parallel_size()
        try:
            self.device = utils.get_device(device=cfg.device)
        except RuntimeError as error:
            raise SettingError("device", cfg.device, f"{told(error)}; give cuda or cpu") from error
        if str(cfg.dtype) in ("fp16", "float16"):
            raise SettingError("dtype", cfg.dtype, "there is no gradient scaling for fp16; use bf16 or fp32")
        try:
            self.dtype = training.get_dtype(cfg.dtype, device=self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            why = f"{told(error).rstrip('.')}; " if isinstance(error, RuntimeError) else ""
            raise SettingError("dtype", cfg.dtype, f"{why}give bf16 or fp32") from error
        self._check_activations()
        self.loss_fn = config.instantiate(cfg.loss)

    def _check_activations(self) -> None:
        cfg = self.cfg
        all_layers, mode = cfg.get("enable_activation_checkpointing", False), cfg.get("ac_mode", None)
        if cfg.get("enable_activation_offloading", False) and not (all_layers and self.device.type == "cuda"):
            remedy = "it needs CUDA and enable_activation_checkpointing=True; set it to False"
            raise SettingError("enable_activation_offloading", True, remedy)
        if mode not in (None, "none", "full", "selective"):
            raise SettingError("ac_mode", mode, "give full, selective with ac_option, or null")
        if mode in ("full", "selective") and all_layers:
            raise SettingError(
                "ac_mode", mode, "enable_activation_checkpointing is True too, which says all layers; remove one"
            )
        option = str(cfg.get("ac_option", None))
        if mode == "selective" and not (option.isdigit() and int(option) > 0):
            remedy = "give a whole number: of so many layers, the activations of one are recomputed"
            raise SettingError("ac_option", cfg.get("ac_option", None), remedy)
        if cfg.device == "npu" and cfg.compile:
            raise SettingError("compile", True, "an NPU does not compile; set it to False")

    def check_model(self) -> None:
        """Refuse a loss or a model of another kind of fine-tuning; a model that needs memory is checked once it is built.

        Raises:
            SettingError: naming the key, and the recipe that fits.
        """
        check_loss(self.loss_fn, self.cfg)
        try:
            model = self.skeleton
        except AdaptiveBatchError:
            raise
        except Exception as error:
            log.debug("the model cannot be built without memory: %s", error)
            return
        self.builder.check(model, self.cfg)

    @cached_property
    def skeleton(self) -> torch.nn.Module:
        """The model without memory."""
        return self.builder.skeleton(self.cfg, dtype=self.dtype)

    @cached_property
    def max_seq_len(self) -> int | None:
        """The most tokens that the model takes; None where it does not say."""
        return getattr(getattr(self.skeleton, "decoder", self.skeleton), "max_seq_len", None)

    def new_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Build the configured optimizer of some parameters."""
        optimizer: torch.optim.Optimizer = config.instantiate(self.cfg.optimizer, parameters)
        return optimizer

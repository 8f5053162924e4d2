"""Another kind of fine-tuning, as a recipe file of its own: only the norms train. All that differs
is the model builder.
"""

import sys
from collections.abc import Iterable

import torch
from adaptive_full_finetune import main
from omegaconf import DictConfig
from torchtune import config

from adaptive_batch.torchtune import FullModel


class NormsAlone(FullModel):
    """Freezes everything but the norms."""

    def freeze(self, model: torch.nn.Module) -> None:
        """Freeze all but the norms."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)

    def trained(self, model: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
        """Return the weights of the norms."""
        return [parameter for parameter in model.parameters() if parameter.requires_grad]


class OfManyBytes(NormsAlone):
    """Would save more than any disk holds."""

    def num_bytes_saved(self, model: torch.nn.Module, cfg: DictConfig) -> int:
        """Return a million TiB."""
        return 2**60


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe."""
    main(cfg, OfManyBytes() if cfg.get("saves_much", False) else NormsAlone())


if __name__ == "__main__":
    sys.exit(recipe_main())

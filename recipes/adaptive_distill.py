"""Knowledge distillation from a frozen teacher on one or more devices, with the largest batch size
that fits.

    tune run adaptive_distill --config NAME use_maximum_batch_size=True
    tune run --nproc_per_node 8 adaptive_distill --config NAME use_maximum_batch_size=True

Any config of torchtune's `knowledge_distillation_single_device` and
`knowledge_distillation_distributed` runs unchanged; this recipe corrects their gradient
(docs/torchtune.md#distillation). The student trains adapters or all weights. See
`adaptive_full_finetune` for everything else.
"""

from __future__ import annotations

from adaptive_full_finetune import main
from omegaconf import DictConfig

from adaptive_batch.torchtune import Distillation, run_recipe


def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe; key=value arguments override the YAML config."""
    main(cfg, task=Distillation)


if __name__ == "__main__":
    run_recipe(recipe_main)

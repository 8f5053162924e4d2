"""Knowledge distillation from a frozen teacher, on one device or many, with a batch size that is
known.

    tune run adaptive_distill --config NAME use_maximum_batch_size=True
    tune run --nproc_per_node 8 adaptive_distill --config NAME use_maximum_batch_size=True

Any config of torchtune's `knowledge_distillation_single_device` and
`knowledge_distillation_distributed` runs unchanged, with the same keys; their gradient is corrected
(docs/torchtune.md#distillation). The student trains adapters or every weight. All else is as in
`adaptive_full_finetune`.
"""

from __future__ import annotations

from adaptive_full_finetune import main
from omegaconf import DictConfig

from adaptive_batch.torchtune import Distillation, builder_of, run_recipe


def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe: YAML first, then key=value from the command line over it."""
    main(cfg, builder_of(cfg), task=Distillation)


if __name__ == "__main__":
    run_recipe(recipe_main)

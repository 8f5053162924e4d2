"""Fine-tuning of adapters (LoRA, QLoRA, DoRA) on one device or many, with a batch size that is
known.

    tune run adaptive_lora_finetune --config NAME use_maximum_batch_size=True
    tune run --nproc_per_node 8 adaptive_lora_finetune --config NAME use_maximum_batch_size=True

Everything of torchtune's `lora_finetune_single_device` and `lora_finetune_distributed` works as it
does there, with the same keys; any config of those recipes runs unchanged. All else is as in
`adaptive_full_finetune`.
"""

from __future__ import annotations

from adaptive_full_finetune import main
from omegaconf import DictConfig

from adaptive_batch.torchtune import AdapterModel, run_recipe


def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe: YAML first, then key=value from the command line over it."""
    main(cfg, AdapterModel())


if __name__ == "__main__":
    run_recipe(recipe_main)

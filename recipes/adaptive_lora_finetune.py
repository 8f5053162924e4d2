"""Fine-tuning of adapters (LoRA, QLoRA, DoRA) on one or more devices, with the largest batch size
that fits.

    tune run adaptive_lora_finetune --config NAME use_maximum_batch_size=True
    tune run --nproc_per_node 8 adaptive_lora_finetune --config NAME use_maximum_batch_size=True

Any config of torchtune's `lora_finetune_single_device` and `lora_finetune_distributed` runs
unchanged. See `adaptive_full_finetune` for everything else.
"""

from __future__ import annotations

from adaptive_full_finetune import main
from omegaconf import DictConfig

from adaptive_batch.torchtune import AdapterModel, run_recipe


def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe; key=value arguments override the YAML config."""
    main(cfg, AdapterModel())


if __name__ == "__main__":
    run_recipe(recipe_main)

"""Direct preference optimization (DPO) of adapters or all weights on one or more devices, with the
largest batch size that fits.

    tune run adaptive_dpo --config NAME use_maximum_batch_size=True
    tune run --nproc_per_node 8 adaptive_dpo --config NAME use_maximum_batch_size=True

Any config of torchtune's `lora_dpo_single_device`, `lora_dpo_distributed` and
`full_dpo_distributed` runs unchanged. A row is a pair of answers and is never split. See
`adaptive_full_finetune` for everything else.
"""

from __future__ import annotations

from adaptive_full_finetune import main
from omegaconf import DictConfig

from adaptive_batch.torchtune import PreferencePairs, run_recipe


def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe; key=value arguments override the YAML config."""
    main(cfg, task=PreferencePairs)


if __name__ == "__main__":
    run_recipe(recipe_main)

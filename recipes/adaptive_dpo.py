"""Direct preference optimization (DPO) of adapters or of every weight, on one device or many, with
a batch size that is known.

    tune run adaptive_dpo --config NAME use_maximum_batch_size=True
    tune run --nproc_per_node 8 adaptive_dpo --config NAME use_maximum_batch_size=True

Everything of torchtune's `lora_dpo_single_device`, `lora_dpo_distributed` and
`full_dpo_distributed` works as it does there, with the same keys; any config of those recipes runs
unchanged. A row is a pair of answers, and is never divided. All else is as in
`adaptive_full_finetune`.
"""

from __future__ import annotations

from adaptive_full_finetune import main
from omegaconf import DictConfig

from adaptive_batch.torchtune import PreferencePairs, builder_of, run_recipe


def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe: YAML first, then key=value from the command line over it."""
    main(cfg, builder_of(cfg), task=PreferencePairs)


if __name__ == "__main__":
    run_recipe(recipe_main)

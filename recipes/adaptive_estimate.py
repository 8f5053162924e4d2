"""Estimate of training memory on devices that this machine lacks: tables and ``estimate.json``.

    tune run adaptive_estimate --config NAME estimate.devices=[H100,RTX4090]
        [estimate.sequence_lengths=[512,2048]]

Any config of `adaptive_full_finetune`, `adaptive_lora_finetune`, `adaptive_dpo` and
`adaptive_distill` works. The estimate needs no accelerator and reads no weights. With
`estimate.sequence_lengths` it reads no data.
"""

from __future__ import annotations

from omegaconf import DictConfig

from adaptive_batch.estimate import MemoryEstimate
from adaptive_batch.torchtune import (
    check_output_dir,
    estimate_devices,
    no_component_exits,
    run_recipe,
)


def estimate(cfg: DictConfig) -> MemoryEstimate:
    """Estimate the memory, print the tables and write the files.

    Args:
        cfg: configuration from YAML and key=value arguments.

    Raises:
        SettingError: a setting is invalid, or a component cannot run on fake tensors.
    """
    path = check_output_dir(cfg.output_dir) / "adaptive_batch" / "estimate.json"
    result = estimate_devices(cfg, save=lambda estimated: estimated.save(path))
    print(f"\nwritten to {path} in {result.seconds:.1f} s")
    return result


def recipe_main(cfg: DictConfig) -> None:
    """Run the estimate; key=value arguments override the YAML config."""
    with no_component_exits():
        estimate(cfg)


if __name__ == "__main__":
    run_recipe(recipe_main)

"""The memory that training would need on devices that are not here: tables, ``estimate.json`` and a
figure.

    tune run adaptive_estimate --config NAME estimate.devices=[H100,RTX4090]
        [estimate.sequence_lengths=[512,2048]]

Any config of `adaptive_full_finetune`, `adaptive_lora_finetune`, `adaptive_dpo` and
`adaptive_distill` works. No weights, no accelerator and, with lengths given, no data are read.
"""

from __future__ import annotations

from omegaconf import DictConfig

from adaptive_batch.errors import AdaptiveBatchError
from adaptive_batch.estimate import MemoryEstimate
from adaptive_batch.report import write_estimate_picture
from adaptive_batch.torchtune import (
    FullModel,
    builder_of,
    check_output_dir,
    estimate_devices,
    no_component_exits,
    run_recipe,
)


def estimate(cfg: DictConfig, *, builder: FullModel | None = None) -> MemoryEstimate:
    """Estimate the memory, print the tables and write the files.

    Args:
        cfg: the configuration: YAML and key=value.
        builder: builds the model; None for what the configuration's model needs.

    Raises:
        SettingError: a setting cannot be used, or a component cannot run on fake tensors.
    """
    path = check_output_dir(cfg.output_dir) / "adaptive_batch" / "estimate.json"
    estimated = estimate_devices(
        cfg, save=lambda one: one.save(path), builder=builder or builder_of(cfg)
    )
    print(f"\nwritten to {path}, in {estimated.seconds:.1f} s")
    try:
        write_estimate_picture(estimated, path.with_suffix(".png"))
        print(f"drawn in {path.with_suffix('.png')}")
    except AdaptiveBatchError as error:
        print(f"no figure: {error}")
    return estimated


def recipe_main(cfg: DictConfig) -> None:
    """Run the estimate: YAML first, then key=value from the command line over it."""
    with no_component_exits():
        estimate(cfg)


if __name__ == "__main__":
    run_recipe(recipe_main)

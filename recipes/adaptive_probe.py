"""Search for the largest batch without training: prints a table and writes ``probe.json``.

    tune run adaptive_probe --config NAME [probe.search=binary]
        [probe.sequence_lengths=[512,1024,2048]]

Any config of `adaptive_full_finetune`, `adaptive_lora_finetune`, `adaptive_dpo` and
`adaptive_distill` works. The result holds for training with the same config.
"""

from __future__ import annotations

from dataclasses import replace

from omegaconf import DictConfig
from torchtune import training

from adaptive_batch import distributed
from adaptive_batch.torchtune import (
    Data,
    Job,
    LimitFinder,
    RunStore,
    Settings,
    Trainer,
    all_ranks,
    check_output_dir,
    run_recipe,
    show_details,
    without_effect,
)
from adaptive_batch.training import MicroBatchSizer


def say(text: str) -> None:
    """Print on rank 0."""
    if distributed.is_rank_zero():
        print(text)


def probe(cfg: DictConfig) -> None:
    """Set up training, and search once for each of ``probe.sequence_lengths`` or, without that key,
    for ``probe.sequence_length``.

    Raises:
        SettingError: a setting is invalid; no weights have been loaded yet.
        DoesNotFitError: one row of a length does not fit; results of earlier lengths are printed.
    """
    # A preview would not look for the files of the weights.
    settings = replace(Settings.from_config(cfg), preview=False)
    for message in without_effect(settings, cfg).values():
        say(message)
    check_output_dir(cfg.output_dir)
    job = Job(cfg, settings)
    training.set_seed(seed=cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
    data = Data.read(job)
    data.check_rows()
    limit_finder = LimitFinder(job, data)
    for message in limit_finder.lost.describe_trials():
        say(message)
    store = RunStore(job)
    limit_finder.check()
    sizer = MicroBatchSizer(
        micro_batch_size=settings.micro_batch_size,
        micro_batch_tokens=settings.micro_batch_tokens,
        layout=data.configured_layout,
        memory=job.memory,
    )
    trainer = Trainer.load(job, data, store.weights, sizer)
    trainer.check_layout()
    store.load_optimizer(trainer)
    for length in settings.probe.sequence_lengths or (settings.probe.sequence_length,):
        result = limit_finder.search_training(trainer, length=length)
        say(f"\n{result.table()}\n")
    if trainer.reference_sizer is not None:
        reference_result = limit_finder.search_reference(trainer, batch_size=result.batch_size)
        say(f"\nreference model, without gradients:\n{reference_result.table()}")


def recipe_main(cfg: DictConfig) -> None:
    """Run the search; key=value arguments override the YAML config."""
    with all_ranks(cfg):
        show_details(cfg, recipe_name="AdaptiveProbe")
        probe(cfg)


if __name__ == "__main__":
    run_recipe(recipe_main)

"""The search for the largest batch alone: no training, a table and ``probe.json``.

    tune run adaptive_probe --config NAME [probe.search=binary] [probe.sequence_lengths=[512,1024,2048]]

Any config of `adaptive_full_finetune` works, so the bound is that of the training it describes.
"""

from __future__ import annotations

import sys

from omegaconf import DictConfig
from torchtune import config, training

from adaptive_batch import distributed
from adaptive_batch._util import format_bytes
from adaptive_batch.distributed import Watchdog
from adaptive_batch.errors import DoesNotFitError
from adaptive_batch.probe import ProbeResult
from adaptive_batch.torchtune import (
    BoundFinder,
    Checkpoints,
    Data,
    Job,
    ModelBuilder,
    Settings,
    Trainer,
    all_ranks,
    check_output_dir,
    left_by_rounding,
    set_up_terminal,
    use_shipped_config,
    without_effect_on,
)


def probe(cfg: DictConfig, watch: Watchdog | None = None, *, builder: ModelBuilder | None = None) -> list[ProbeResult]:
    """Build what training would build, and search once for each length.

    Returns:
        A result for each of ``probe.sequence_lengths`` at which a row fits, or one for ``probe.sequence_length``.

    Raises:
        SettingError: a setting cannot be used; no weights have been loaded yet.
        DoesNotFitError: not even one row fits, at any length.
    """
    settings = Settings.from_config(cfg)
    check_output_dir(cfg.output_dir)
    job = Job(cfg, settings, builder)
    training.set_seed(seed=cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
    data = Data.read(job)
    data.check_rows()
    bounds = BoundFinder(job, data)
    bounds.watch = watch
    checkpoints = Checkpoints(cfg, settings)
    bounds.check()
    trainer = Trainer.load(job, data, checkpoints)
    checkpoints.load_optimizer(trainer)
    results, refused = [], None

    def say(text: str) -> None:
        if distributed.is_rank_zero():
            print(text)

    for keys in without_effect_on("adaptive_probe", settings, cfg, ranks=distributed.world_size()):
        say(str(keys))
    for length in settings.probe.sequence_lengths or (settings.probe.sequence_length,):
        try:
            *_, result = bounds.of_training(trainer, length=length, batch_size=settings.batch_size)
        except DoesNotFitError as error:
            if distributed.world_size() > 1:  # it may be on one rank alone, and the others wait for it
                raise
            say(f"\n{length} tokens: {error}\n")
            refused = error
            continue
        say("\n".join(["", result.table(), left_by_rounding(result.max_batch_size, result.batch_size)]))
        results.append(result)
    if refused and not results:
        raise refused
    if len(results) > 1:
        say(summary(results))
    return results


def summary(results: list[ProbeResult]) -> str:
    """One aligned line for each length."""
    lines = [f"{'length':>7} {'max_batch_size':>15} {'tokens':>8} {'peak':>10}"]
    for result in results:
        tokens = result.max_batch_size * result.sequence_length
        peak = format_bytes(result.peak_bytes() or 0)
        lines.append(f"{result.sequence_length:>7} {result.bound:>15} {tokens:>8} {peak:>10}")
    return "\n".join(lines)


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Run the search: YAML first, then key=value from the command line over it."""
    with all_ranks(cfg) as watch:
        if distributed.is_rank_zero():
            config.log_config(recipe_name="AdaptiveProbe", cfg=cfg)
        probe(cfg, watch)


if __name__ == "__main__":
    set_up_terminal()
    use_shipped_config(sys.argv)
    sys.exit(recipe_main())

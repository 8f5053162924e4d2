"""The search for the largest batch alone: no training, a table and ``probe.json``.

    tune run adaptive_probe --config NAME [probe.search=binary]
        [probe.sequence_lengths=[512,1024,2048]]

Or instead, for the largest batch that loses no more than a tolerance:

    tune run adaptive_probe --config NAME probe.critical_batch=True

Any config of `adaptive_full_finetune`, `adaptive_lora_finetune`, `adaptive_dpo` and
`adaptive_distill` works, so the bound is that of the training it describes.
"""

from __future__ import annotations

from omegaconf import DictConfig
from torchtune import training

from adaptive_batch import distributed
from adaptive_batch._util import format_bytes
from adaptive_batch.distributed import Watchdog
from adaptive_batch.errors import DoesNotFitError, SettingError
from adaptive_batch.probe import ProbeResult
from adaptive_batch.torchtune import (
    BoundFinder,
    Checkpoints,
    Data,
    FullModel,
    Job,
    Settings,
    Sizers,
    Trainer,
    advise,
    all_ranks,
    builder_of,
    check_output_dir,
    estimate_spending,
    left_by_rounding,
    measure_critical_batch,
    run_recipe,
    show_details,
    tokens_per_second,
    with_overrides,
    without_effect_on,
)


def say(text: str) -> None:
    """Print, on one rank alone."""
    if distributed.is_rank_zero():
        print(text)


def build(
    cfg: DictConfig, watch: Watchdog | None, builder: FullModel | None
) -> tuple[Job, Data, BoundFinder, Trainer]:
    """Build what training would build, and refuse what it would refuse: settings before weights are
    loaded, and then a layout that the model cannot train in.
    """
    settings = Settings.from_config(cfg)
    check_output_dir(cfg.output_dir)
    job = Job(cfg, settings, builder or builder_of(cfg))
    training.set_seed(seed=cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
    data = Data.read(job)
    data.check_rows()
    bound_finder = BoundFinder(job, data, watch=watch)
    checkpoints = Checkpoints(cfg, settings, keeps_base=job.builder.keeps_base)
    bound_finder.check()
    trainer = Trainer.load(job, data, checkpoints, Sizers.of(job, data))
    trainer.check_layout()
    checkpoints.load_optimizer(trainer)
    return job, data, bound_finder, trainer


def probe(
    cfg: DictConfig, watch: Watchdog | None = None, *, builder: FullModel | None = None
) -> list[ProbeResult]:
    """Build what training would build, and search once for each length.

    Returns:
        A result for each of ``probe.sequence_lengths`` at which a row fits, or one for
        ``probe.sequence_length``; none where ``probe.critical_batch`` is measured instead.

    Raises:
        SettingError: a setting cannot be used; no weights have been loaded yet.
        DoesNotFitError: not even one row fits, at any length.
    """
    settings = Settings.from_config(cfg)
    for keys in without_effect_on("adaptive_probe", settings, cfg, ranks=distributed.world_size()):
        say(str(keys))
    if settings.probe.critical_batch:
        say(measure_critical_batch(Job(cfg, settings, builder or builder_of(cfg))))
        return []
    job, data, bound_finder, trainer = build(cfg, watch, builder)
    results = []
    fitting_lengths = []
    refused = None
    for length in settings.probe.sequence_lengths or (settings.probe.sequence_length,):
        try:
            *_, result = bound_finder.of_training(trainer, length=length)
        except DoesNotFitError as error:
            # It may be on one rank alone, and the others wait for it.
            if distributed.world_size() > 1:
                raise
            say(f"\n{length} tokens: {error}\n")
            refused = error
            continue
        say("\n".join(["", result.table(), left_by_rounding(result)]))
        results.append(result)
        fitting_lengths.append(length)
    if refused and not results:
        raise refused
    if len(results) > 1:
        say(summary(results))
    result = results[-1]
    if trainer.runner.reference is not None:
        step_rows = result.batch_size * settings.gradient_accumulation_steps
        of_reference = bound_finder.of_reference(trainer, step_rows=step_rows)
        say(f"\nthe reference alone, without gradients:\n{of_reference.table()}")
    batch_size = result.batch_size if settings.use_maximum_batch_size else settings.batch_size
    if settings.probe.tune:
        # The other settings need their memory.
        del bound_finder, data, trainer
        tune(job, result, fitting_lengths[-1], watch)
        return results
    advice = advise(job, data, result, batch_size=batch_size)
    if advice:
        say(advice)
    return results


def tune(job: Job, result: ProbeResult, length: int | str, watch: Watchdog | None) -> None:
    """Search and time the configuration as it is and the joint settings that an estimate puts
    first; print a table, the fastest first.

    Args:
        job: job of the search.
        result: result of the search at this length.
        length: ``longest``, ``max_seq_len`` or a number of tokens.
        watch: watchdog of this rank, of several.
    """
    estimated = estimate_spending(job, result, job.settings.probe.maximum)[1:]
    joint = [(overrides, fit) for overrides, fit, _ in estimated if fit.max_batch_size]
    joint.sort(key=lambda entry: -(entry[1].modelled_tokens_per_second or 0))
    lines = []
    for overrides in [(), *(overrides for overrides, _ in joint[:3])]:
        name = " ".join(overrides) or "(as it is)"
        # This gives back the memory of the last.
        trainer = None
        try:
            *_, bound_finder, trainer = build(
                with_overrides(job.cfg, overrides), watch, job.builder
            )
            *_, tuned_result = bound_finder.of_training(trainer, length=length)
            rows = bound_finder.rows.of_length(length).first(tuned_result.batch_size)
            speed = tokens_per_second(trainer, tuned_result, rows)
        except (DoesNotFitError, SettingError) as error:
            if distributed.world_size() > 1:
                raise
            say(f"{name}: {error}")
            continue
        peak = format_bytes(tuned_result.peak_bytes() or 0)
        lines.append(
            (speed, f"{tuned_result.batch_size:>6} {peak:>10} {speed:>9.0f}  {name}", overrides)
        )
    if not lines:
        say("no setting fits now that the search has ended, not even the configuration as it is")
        return
    lines.sort(reverse=True)
    say(
        "\n".join(
            [
                "",
                f"{'rows':>6} {'peak':>10} {'tokens/s':>9}  setting",
                *(line for _, line, _ in lines),
            ]
        )
    )
    say(f"fastest: {' '.join(lines[0][2]) or 'the configuration as it is'}")


def summary(results: list[ProbeResult]) -> str:
    """One aligned line for each length."""
    lines = [f"{'length':>7} {'max_batch_size':>15} {'tokens':>8} {'peak':>10}"]
    for result in results:
        tokens = result.max_batch_size * result.sequence_length
        peak = format_bytes(result.peak_bytes() or 0)
        lines.append(f"{result.sequence_length:>7} {result.bound:>15} {tokens:>8} {peak:>10}")
    return "\n".join(lines)


def recipe_main(cfg: DictConfig) -> None:
    """Run the search: YAML first, then key=value from the command line over it."""
    with all_ranks(cfg) as watch:
        show_details(cfg, recipe_name="AdaptiveProbe")
        probe(cfg, watch)


if __name__ == "__main__":
    run_recipe(recipe_main)

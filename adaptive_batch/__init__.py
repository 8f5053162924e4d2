"""adaptive_batch: the batch size of a fine-tuning run, known instead of guessed.

With torchtune, `tune run` finds the recipes `adaptive_full_finetune`, `adaptive_lora_finetune`,
`adaptive_dpo`, `adaptive_distill`, `adaptive_probe` and `adaptive_estimate`. For any other PyTorch
loop there are four objects, each usable alone:

    AdaptiveStep         splits a batch into parts that fit, and runs it again where memory runs out
    AdaptiveBatches      yields row numbers to a DataLoader, in batches that grow and resume exactly
    AdaptiveRate         sets the learning rate of each step, scaled with its batch
    find_max_batch_size  finds the largest batch whose whole training step fits

`AdaptiveLoop` is the four put together. The packages below this one, lowest first:

    schedules     what training has consumed, how the batch size and the learning rate follow it
    distributed   ranks: collectives, FSDP2, the watchdog, preemption
    data          lengths and order of rows, batches that grow, micro-batches, balance across ranks
    memory        device memory, live bytes, the curve of the peak, snapshots of the training state
    probe         the search for the maximum batch size
    estimate      a training step on fake tensors: what a device that is not here would hold
    emulate       PyTorch's CUDA build on a device that is not here, for any program
    checkpoint    resume points that are complete or absent
    training      the step, retry after running out of memory, the search, the rate, evaluation
    report        the run log, the audit, figures and the page
    torchtune     what the recipes are made of

Importing this package imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from adaptive_batch._util import lazy_imports

__version__ = "0.1.0"

# The public names, written once: type checkers follow these imports, and at run time each is made
# when its name is first used.
if TYPE_CHECKING:
    from .data import AdaptiveBatches as AdaptiveBatches, Sampling as Sampling
    from .errors import (
        AdaptiveBatchError as AdaptiveBatchError,
        CheckpointError as CheckpointError,
        DoesNotFitError as DoesNotFitError,
        GrowthFunctionError as GrowthFunctionError,
        NonfiniteLossError as NonfiniteLossError,
        RankLostError as RankLostError,
        SettingError as SettingError,
    )
    from .estimate import estimate_memory as estimate_memory
    from .memory import is_out_of_memory as is_out_of_memory
    from .probe import ProbeResult as ProbeResult
    from .report import audit as audit, write_report as write_report
    from .schedules import (
        Progress as Progress,
        at_epochs as at_epochs,
        by_noise_scale as by_noise_scale,
        geometric as geometric,
        linear_ramp as linear_ramp,
        ramp_by_doubling as ramp_by_doubling,
        seesaw as seesaw,
        steps as steps,
    )
    from .training import (
        AdaptiveLoop as AdaptiveLoop,
        AdaptiveRate as AdaptiveRate,
        AdaptiveStep as AdaptiveStep,
        OOMPolicy as OOMPolicy,
        Part as Part,
        ProbeOptions as ProbeOptions,
        SplitBatch as SplitBatch,
        StepOptions as StepOptions,
        StepResult as StepResult,
        find_max_batch_size as find_max_batch_size,
        pack_rows as pack_rows,
    )
else:
    __all__, __getattr__ = lazy_imports(__name__, __loader__.get_source(__name__))

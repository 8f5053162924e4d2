"""adaptive_batch: find, split and grow the batch of a fine-tuning run.

With torchtune, `tune run` finds the recipes `adaptive_full_finetune`, `adaptive_lora_finetune`,
`adaptive_dpo`, `adaptive_distill`, `adaptive_probe` and `adaptive_estimate`. For any other PyTorch
loop there are four objects, each usable alone:

    AdaptiveStep         splits a batch into parts that fit, and repeats it after an OOM
    AdaptiveBatches      yields row numbers to a DataLoader, in batches that grow and resume exactly
    AdaptiveRate         sets the learning rate of each step, scaled with its batch
    find_max_batch_size  finds the largest batch whose whole training step fits

`AdaptiveLoop` combines all four. The packages, lowest first:

    schedules     training progress, batch schedules and the learning rate
    distributed   collectives, FSDP2, the watchdog, preemption
    data          lengths and order of rows, batches that grow, micro-batches, balance across ranks
    memory        device memory, live bytes, the curve of the peak, snapshots of the training state
    probe         the search for the maximum batch size
    estimate      memory estimates for unavailable devices, by a training step on fake tensors
    emulate       PyTorch's CUDA build on an emulated device, for any program
    checkpoint    resume points that are complete or absent
    training      the step, retry after an OOM, the search, the learning rate, evaluation
    report        the run log, the audit, figures and the page
    integrations  the trainers of other libraries
    torchtune     the parts of the recipes

Importing this package does not import torch: names are imported at their first use.
"""

import ast
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# The public names. Type checkers follow these imports; at run time they are imported lazily.
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
    # The relative imports above, by name.
    _MODULES = {
        alias.name: f".{node.module}"
        for node in ast.walk(ast.parse(__loader__.get_source(__name__)))
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    __all__ = list(_MODULES)

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name], __name__), name)

"""adaptive_batch: the batch size of a fine-tuning run, known instead of guessed.

With torchtune, the recipes `adaptive_full_finetune` and `adaptive_probe` are all one needs. In any other PyTorch loop,
`AdaptiveLoop` does the same. The packages below this one, lowest first:

    schedules     what training has consumed, how the batch size and the learning rate follow it
    distributed   ranks: collectives, FSDP2, the watchdog, preemption
    data          lengths of rows, samplers, micro-batches, balance across ranks
    memory        device memory, live bytes, the curve of the peak, snapshots of the training state
    probe         the search for the maximum batch size
    estimate      a training step on fake tensors: what a device that is not here would hold
    checkpoint    resume points that are complete or absent
    training      the loop: micro-batches, retry after running out of memory, evaluation
    report        the run log, the audit, figures and the page
    torchtune     what the recipes are made of

Importing this package imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from ._util import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .data import MicroBatchLimit as MicroBatchLimit
    from .errors import AdaptiveBatchError as AdaptiveBatchError
    from .errors import CheckpointError as CheckpointError
    from .errors import DoesNotFitError as DoesNotFitError
    from .errors import GrowthFunctionError as GrowthFunctionError
    from .errors import RankLostError as RankLostError
    from .errors import SettingError as SettingError
    from .estimate import estimate_memory as estimate_memory
    from .memory import is_out_of_memory as is_out_of_memory
    from .probe import ProbeResult as ProbeResult
    from .report import audit as audit
    from .report import write_report as write_report
    from .schedules import Progress as Progress
    from .schedules import at_epochs as at_epochs
    from .schedules import by_critical_batch as by_critical_batch
    from .schedules import by_noise_scale as by_noise_scale
    from .schedules import geometric as geometric
    from .schedules import linear_ramp as linear_ramp
    from .schedules import ramp_by_doubling as ramp_by_doubling
    from .schedules import seesaw as seesaw
    from .schedules import steps as steps
    from .training import AdaptiveLoop as AdaptiveLoop
    from .training import OOMPolicy as OOMPolicy
    from .training import Sampling as Sampling
    from .training import StepOptions as StepOptions
    from .training import StepResult as StepResult

_PACKAGE_OF = {
    "AdaptiveBatchError": ".errors",
    "CheckpointError": ".errors",
    "DoesNotFitError": ".errors",
    "GrowthFunctionError": ".errors",
    "RankLostError": ".errors",
    "SettingError": ".errors",
    "estimate_memory": ".estimate",
    "is_out_of_memory": ".memory",
    "ProbeResult": ".probe",
    "audit": ".report",
    "write_report": ".report",
    "Progress": ".schedules",
    "at_epochs": ".schedules",
    "by_critical_batch": ".schedules",
    "by_noise_scale": ".schedules",
    "geometric": ".schedules",
    "linear_ramp": ".schedules",
    "ramp_by_doubling": ".schedules",
    "seesaw": ".schedules",
    "steps": ".schedules",
    "AdaptiveLoop": ".training",
    "MicroBatchLimit": ".data",
    "OOMPolicy": ".training",
    "Sampling": ".training",
    "StepOptions": ".training",
    "StepResult": ".training",
}
__all__ = [*_PACKAGE_OF]
__getattr__ = lazy_names(__name__, _PACKAGE_OF)

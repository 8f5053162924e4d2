"""What the recipes for torchtune are made of; the only package that imports torchtune or omegaconf.

Its names are imported when they are first used, so that `python -m adaptive_batch check` starts where torchtune does not.
"""

from typing import TYPE_CHECKING

from adaptive_batch._util import lazy_names

if TYPE_CHECKING:
    from .batches import StepPlanner as StepPlanner
    from .bound import BatchSizeFinder as BatchSizeFinder
    from .capacity import LimitFinder as LimitFinder
    from .checkpoint import STATE_KEY as STATE_KEY
    from .conditions import compare as compare
    from .conditions import conditions_of as conditions_of
    from .environment import check as check
    from .estimates import estimate_devices as estimate_devices
    from .fake_parts import FakeParts as FakeParts
    from .log import TrainingLog as TrainingLog
    from .log import base_rate as base_rate
    from .needs import complete as complete
    from .no_effect import without_effect as without_effect
    from .no_effect import without_effect_on_probe as without_effect_on_probe
    from .parts import TrainingParts as TrainingParts
    from .parts import set_up_terminal as set_up_terminal
    from .parts import use_shipped_config as use_shipped_config
    from .preview import TrainingPreview as TrainingPreview
    from .ranks import agree_on_step as agree_on_step
    from .ranks import all_ranks as all_ranks
    from .ranks import check_fewer_ranks as check_fewer_ranks
    from .rate import RateController as RateController
    from .rate import check_scheduler as check_scheduler
    from .rate import reference_batch as reference_batch
    from .resume import Checkpoints as Checkpoints
    from .settings import Settings as Settings
    from .shipped import config_path as config_path
    from .shipped import copy_config as copy_config
    from .shipped import shipped_configs as shipped_configs
    from .validation import Validation as Validation

__getattr__ = lazy_names(
    __name__,
    {
        "StepPlanner": ".batches",
        "BatchSizeFinder": ".bound",
        "LimitFinder": ".capacity",
        "STATE_KEY": ".checkpoint",
        "compare": ".conditions",
        "conditions_of": ".conditions",
        "check": ".environment",
        "estimate_devices": ".estimates",
        "FakeParts": ".fake_parts",
        "TrainingLog": ".log",
        "base_rate": ".log",
        "complete": ".needs",
        "without_effect": ".no_effect",
        "without_effect_on_probe": ".no_effect",
        "TrainingParts": ".parts",
        "set_up_terminal": ".parts",
        "use_shipped_config": ".parts",
        "TrainingPreview": ".preview",
        "agree_on_step": ".ranks",
        "all_ranks": ".ranks",
        "check_fewer_ranks": ".ranks",
        "RateController": ".rate",
        "check_scheduler": ".rate",
        "reference_batch": ".rate",
        "Checkpoints": ".resume",
        "Settings": ".settings",
        "config_path": ".shipped",
        "copy_config": ".shipped",
        "shipped_configs": ".shipped",
        "Validation": ".validation",
    },
)

__all__ = [
    "STATE_KEY",
    "BatchSizeFinder",
    "Checkpoints",
    "FakeParts",
    "LimitFinder",
    "RateController",
    "Settings",
    "StepPlanner",
    "TrainingLog",
    "TrainingParts",
    "TrainingPreview",
    "Validation",
    "agree_on_step",
    "all_ranks",
    "base_rate",
    "check",
    "check_fewer_ranks",
    "check_scheduler",
    "compare",
    "complete",
    "conditions_of",
    "config_path",
    "copy_config",
    "estimate_devices",
    "reference_batch",
    "set_up_terminal",
    "shipped_configs",
    "use_shipped_config",
    "without_effect",
    "without_effect_on_probe",
]

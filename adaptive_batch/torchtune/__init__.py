"""What the recipes for torchtune are made of; the only package that imports torchtune or omegaconf.

Its names are imported when they are first used, so that `python -m adaptive_batch check` starts where torchtune does not.
"""

from typing import TYPE_CHECKING

from adaptive_batch._util import lazy_names

if TYPE_CHECKING:
    from .adapter_model import AdapterModel as AdapterModel
    from .adapter_model import builder_of as builder_of
    from .advice import advise as advise
    from .advice import estimate_spending as estimate_spending
    from .advice import tokens_per_second as tokens_per_second
    from .bound_finder import BoundFinder as BoundFinder
    from .bound_finder import left_by_rounding as left_by_rounding
    from .bound_finder import settings_name as settings_name
    from .checkpoints import Checkpoints as Checkpoints
    from .checks import check_output_dir as check_output_dir
    from .checks import without_effect as without_effect
    from .checks import without_effect_on as without_effect_on
    from .config_errors import instantiate as instantiate
    from .configs import config_path as config_path
    from .configs import copy_config as copy_config
    from .configs import shipped_configs as shipped_configs
    from .critical_batch import measure_critical_batch as measure_critical_batch
    from .data import Data as Data
    from .doctor import check as check
    from .epoch_checkpoints import STATE_KEY as STATE_KEY
    from .estimate_changes import with_overrides as with_overrides
    from .estimates import estimate_devices as estimate_devices
    from .job import Job as Job
    from .launch import all_ranks as all_ranks
    from .launch import interruptible as interruptible
    from .launch import no_component_exits as no_component_exits
    from .launch import set_up_terminal as set_up_terminal
    from .launch import use_shipped_config as use_shipped_config
    from .limit_finder import LimitFinder as LimitFinder
    from .log import TrainingLog as TrainingLog
    from .lost_run import LostRun as LostRun
    from .model import FullModel as FullModel
    from .model import ModelBuilder as ModelBuilder
    from .preview import TrainingPreview as TrainingPreview
    from .rate import build_rate as build_rate
    from .rate import check_scheduler as check_scheduler
    from .rate import couple_batch as couple_batch
    from .resumed_run import ResumedRun as ResumedRun
    from .settings import Settings as Settings
    from .settings import reference_tables as reference_tables
    from .settings import write_reference as write_reference
    from .trainer import Trainer as Trainer
    from .validation import Validation as Validation

_NAMES_OF = {
    ".adapter_model": ("AdapterModel", "builder_of"),
    ".advice": ("advise", "estimate_spending", "tokens_per_second"),
    ".bound_finder": ("BoundFinder", "left_by_rounding", "settings_name"),
    ".checkpoints": ("Checkpoints",),
    ".checks": ("check_output_dir", "without_effect", "without_effect_on"),
    ".config_errors": ("instantiate",),
    ".configs": ("config_path", "copy_config", "shipped_configs"),
    ".critical_batch": ("measure_critical_batch",),
    ".data": ("Data",),
    ".doctor": ("check",),
    ".epoch_checkpoints": ("STATE_KEY",),
    ".estimate_changes": ("with_overrides",),
    ".estimates": ("estimate_devices",),
    ".job": ("Job",),
    ".launch": ("all_ranks", "interruptible", "no_component_exits", "set_up_terminal", "use_shipped_config"),
    ".limit_finder": ("LimitFinder",),
    ".log": ("TrainingLog",),
    ".lost_run": ("LostRun",),
    ".model": ("FullModel", "ModelBuilder"),
    ".preview": ("TrainingPreview",),
    ".rate": ("build_rate", "check_scheduler", "couple_batch"),
    ".resumed_run": ("ResumedRun",),
    ".settings": ("Settings", "reference_tables", "write_reference"),
    ".trainer": ("Trainer",),
    ".validation": ("Validation",),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}
__all__ = [*_MODULE_OF]
__getattr__ = lazy_names(__name__, _MODULE_OF)

"""Configurations: as plain values, their components, errors on one line, and keys.

A key is an option: a field of a frozen dataclass. Names that are refused, settings without effect,
changes on resuming and the tables of docs/configuration.md are derived from the fields and from the
``Attributes`` of their docstrings.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from torchtune import config
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path, _merge_yaml_and_cli_args

from adaptive_batch._util import Option, nearest
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.schedules import check_rule

_BLOCK = "give a block with _component_, as in torchtune's configs, which `tune ls` lists"
_NEEDED = {
    "device": "give cuda or cpu",
    "dtype": "give bf16 or fp32",
    "seed": "give a whole number, or null",
    "output_dir": "give a folder of yours",
    "resume_from_checkpoint": "give False, True to resume from what was saved last, or auto",
    "shuffle": "give True or False",
}


def as_dict(cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as a dict of plain values, with references resolved."""
    plain: Any = cfg
    if isinstance(cfg, DictConfig):
        try:
            plain = OmegaConf.to_container(cfg, resolve=True)
        except OmegaConfBaseException as error:
            raise plainly(error) or error from error
    return {str(key): value for key, value in plain.items()}


def component_of(value: Any) -> Any:
    """Return the component of a block, and any other value unchanged."""
    if isinstance(value, Mapping):
        return value.get("_component_")
    return value


def missing(key: str) -> SettingError:
    """Return the error for a missing key."""
    return SettingError(key, None, f"it is missing; {_NEEDED.get(key, _BLOCK)}")


def check_block(key: str, value: Any, *, several: bool = False) -> None:
    """Raise SettingError if a value is not a block with ``_component_``.

    Args:
        key: key of the value.
        value: value of the configuration.
        several: whether a list of blocks is allowed.
    """
    # An empty list is checked as a single block, and so refused.
    is_list = several and isinstance(value, list) and bool(value)
    for block in value if is_list else [value]:
        if not (isinstance(block, Mapping) and isinstance(block.get("_component_"), str)):
            raise SettingError(key, block, _BLOCK)


@contextmanager
def refusing(
    key: str,
    value: object,
    remedy: str = "ADAPTIVE_BATCH_TRACEBACK=1 shows where",
    *,
    problem: str = "it cannot be built",
) -> Iterator[None]:
    """Context manager: turn errors of a component into a SettingError of its key.

    Args:
        key, value: key and value that the error names.
        remedy: end of the message.
        problem: start of the message, before the component's own error.
    """
    try:
        yield
    # These two name their key already.
    except (AdaptiveBatchError, OmegaConfBaseException):
        raise
    # User code and libraries raise any kind of error.
    except Exception as error:
        message = one_line(error)
        # torchtune's message says what failed, so its class adds nothing.
        if not isinstance(error, InstantiationError):
            message = f"{type(error).__name__}: {message}"
        if error.__cause__ is not None:
            message = f"{message} ({one_line(error.__cause__)})"
        raise SettingError(key, value, f"{problem}: {message}; {remedy}") from error


def instantiate(key: str, block: DictConfig, *arguments: Any, **more: Any) -> Any:
    """Build the component of a block of the configuration.

    Raises:
        SettingError: it cannot be built with the values of the block.
    """
    with refusing(key, block.get("_component_")):
        return config.instantiate(block, *arguments, **more)


def plainly(error: BaseException) -> AdaptiveBatchError | None:
    """Return an error of the configuration as an error of this package that fits on one line; None
    for any other error.
    """
    if isinstance(error, AdaptiveBatchError):
        return error
    plain: AdaptiveBatchError
    if isinstance(error, OmegaConfBaseException):
        key = str(error.full_key or error.key or "config")
        if isinstance(error, ConfigAttributeError | ConfigKeyError | MissingMandatoryValue):
            plain = missing(key)
        else:
            # Such as a reference to a key that does not exist. Later lines repeat the key.
            first_line = str(error).partition("\n")[0]
            plain = SettingError(key, None, f"{first_line}; give it a value of its own")
    elif isinstance(error, InstantiationError):
        plain = SettingError("_component_", None, one_line(error))
    else:
        return None
    plain.__cause__ = error
    return plain


def one_line(error: BaseException) -> str:
    """Return an error's message on one line; of a long one, the first and the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    if len(lines) > 4:
        lines = [lines[0], "...", lines[-1]]
    return " ".join(lines)


def merged(cfg: DictConfig, arguments: Sequence[str]) -> Any:
    """Return a copy of a configuration with torchtune's command-line arguments applied."""
    values: Any = OmegaConf.to_container(cfg)
    return _merge_yaml_and_cli_args(Namespace(**values), [*arguments])


T = TypeVar("T")

# Keys of torchtune's configs, by the effect of a change on resuming (see `Option.resume`).
_THEIRS = {
    "refuse": "dataset model lr_scheduler",
    "epoch": "shuffle",
    "report": (
        "batch_size epochs max_steps_per_epoch optimizer_in_bwd "
        "gradient_accumulation_steps dtype loss clip_grad_norm enable_activation_checkpointing "
        "enable_activation_offloading compile ref_checkpointer teacher_model teacher_checkpointer "
        "kd_loss kd_ratio"
    ),
    "free": (
        "ac_mode ac_option checkpointer collate_fn cudnn_deterministic_mode"
        " custom_sharded_layers device fsdp_cpu_offload fsdp_reshard_after_forward"
        " log_every_n_steps log_peak_memory_stats low_cpu_ram metric_logger"
        " optimizer output_dir profiler resume_from_checkpoint"
        " save_adapter_weights_only seed tensor_parallel_dim tensor_parallel_plan tokenizer"
    ),
}
TORCHTUNE_KEYS: Mapping[str, str] = {
    name: policy for policy, names in _THEIRS.items() for name in names.split()
}
# Keys of torchtune's other configs, and the recipes that read them.
_OTHER_RECIPES = {
    "quantizer": "qat_distributed trains for it, and quantize does not train",
    "policy_model": "ppo_full_finetune_single_device trains by reinforcement learning",
    "tasks": "eleuther_eval does not train",
    "max_new_tokens": "generate does not train",
}
_CRITICAL_BATCH = (
    "this key was removed; log_gradient_noise_scale=True estimates the batch beyond which more rows"
    " improve a step little, and docs/accuracy.md#does-a-growing-batch-pay-off compares rules that"
    " grow the batch"
)
# Keys and functions of earlier releases: dotted name -> the fix.
REMOVED: dict[str, str] = {
    "probe.critical_batch": _CRITICAL_BATCH,
    "probe.critical_batch_from": _CRITICAL_BATCH,
    "probe.critical_batch_rows": _CRITICAL_BATCH,
    "probe.critical_batch_tolerance": _CRITICAL_BATCH,
    "probe.trial_timeout": (
        "this key was removed; a trial that hangs on a rank ends the run after 10 minutes, the"
        " timeout of the process group"
    ),
    "probe.tune": (
        "this key was removed; adaptive_estimate with estimate.changes=True estimates single"
        " changes, and docs/configuration.md#recommended-settings lists which settings to use"
    ),
    "adaptive_batch.schedules.by_critical_batch": (
        "this function was removed; give the same batches to adaptive_batch.schedules.steps, as in"
        " {batch_sizes: [16, 24, 64], thresholds: [1e5tok, 1e6tok]}"
    ),
}
# Similarity of a typo: lr_scale is taken for lr_scaling, compile_mode (0.74) not for compile.
_CLOSE = 0.77


def fields_of(block: type) -> dict[str, Field[Any]]:
    """Return the fields of the keys of a dataclass of settings by name."""
    return {each.name: each for each in fields(block) if "option" in each.metadata}


def keys_of(block: type) -> dict[str, Option]:
    """Return the keys of a dataclass of settings by name."""
    return {name: key_field.metadata["option"] for name, key_field in fields_of(block).items()}


def values_of(settings: Any) -> dict[str, Any]:
    """Return the values of all keys of settings by name."""
    return {name: getattr(settings, name) for name in fields_of(type(settings))}


def read_keys(block: type, config: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Read and check the given keys of a dataclass; null counts as absent.

    Args:
        block: dataclass with a field for each key.
        config: values by key.
        prefix: start of the keys' dotted names in errors.
    """
    values: dict[str, Any] = {}
    for name, key_field in fields_of(block).items():
        value = config.get(name)
        is_required = key_field.default is MISSING
        if is_required or value is not None:
            converted = key_field.metadata["option"].read(prefix + name, value)
            # A reader that only checks the value returns None.
            values[name] = value if converted is None else converted
    return values


def block(settings: type[T]) -> Callable[[str, Any], T]:
    """Return the reader of a key whose value is a block of keys, the fields of a dataclass."""

    def read(name: str, value: Any) -> T:
        keys = list(keys_of(settings))
        if not isinstance(value, Mapping):
            raise SettingError(name, value, f"give a block of keys, such as {name}.{keys[0]}=...")
        for key in value:
            if key not in keys:
                remedy = f"there is no such key; {nearest(str(key), keys)}"
                path = f"{name}.{key}"
                raise SettingError(path, value[key], REMOVED.get(path, remedy))
        return settings(**read_keys(settings, value, prefix=f"{name}."))

    return read


# --- names


def check_names(settings: type, config: Mapping[str, Any] | DictConfig) -> None:
    """Raise SettingError for a key of another recipe, and for a key that nothing reads and that
    looks like a misspelled one.

    Args:
        settings: dataclass of our top-level keys.
        config: configuration as given, with its references.
    """
    for key, recipe in _OTHER_RECIPES.items():
        if config.get(key) is not None:
            remedy = f"this is a config of another recipe: torchtune's {recipe}; remove the key"
            raise SettingError(key, component_of(config[key]), remedy)
    known = {*keys_of(settings), *TORCHTUNE_KEYS}
    for name in unread(settings, config):
        matches = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
        if matches:
            remedy = f"there is no such key; {matches[0]} is probably meant"
            raise SettingError(name, config[name], remedy)


def unread(settings: type, config: Mapping[str, Any] | DictConfig) -> list[str]:
    """Return the top-level keys that no settings, no code of torchtune and no reference reads."""
    read = {*keys_of(settings), *TORCHTUNE_KEYS}
    # References are in the text of the configuration: ${model.embed_dim} reads `model`.
    for reference in re.findall(r"\$\{([^}]*)", str(config)):
        words = re.findall(r"[\w-]+", reference)
        # ${resolver:...} and nested references: any word may be a key.
        is_complex = ":" in reference or "${" in reference
        read.update(words if is_complex else words[:1])
    return [str(name) for name in config if str(name) not in read]


# --- documentation


def documented(block: type) -> dict[str, str]:
    """Return the documentation of the attributes of a dataclass, by name."""
    texts: dict[str, str] = {}
    # Base classes first, so that a subclass overrides their texts.
    for owner in reversed(block.__mro__):
        docstring = inspect.cleandoc(owner.__doc__ or "")
        _, _, attributes = docstring.partition("\nAttributes:\n")
        # `name: text` with an indent of 4, and more lines of the text with an indent of 8.
        for name, text in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.M):
            texts[name] = " ".join(text.replace("None", "null").split())
    return texts


def table(block: type, *, prefix: str = "") -> str:
    """Return our keys of a dataclass as a table in Markdown."""
    texts = documented(block)
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, key_field in fields_of(block).items():
        if name not in TORCHTUNE_KEYS:
            default = "null" if key_field.default is None else f"`{key_field.default}`"
            shown_default = key_field.metadata["option"].shown or default
            rows.append(f"| `{prefix}{name}` | {shown_default} | {texts[name]} |")
    return "\n".join(rows)


# --- functions


def function(name: str, value: Any) -> Any:
    """Read a key that names a function by a dotted path, or builds one by a block with
    `_component_`.
    """
    if isinstance(value, Mapping):
        component = value.get("_component_")
        build = load_function(component, key=f"{name}._component_")
        arguments = {str(key): given for key, given in value.items() if key != "_component_"}
        remedy = (
            f"correct its arguments; to use the function without a call, write {name}: {component}"
        )
        if _is_ours(build):
            parameters = inspect.signature(build).parameters.values()
            # Without their types.
            names = [str(each.replace(annotation=each.empty)) for each in parameters]
            remedy = f"its arguments are ({', '.join(names)})"
        with refusing(f"{name}._component_", component, remedy):
            loaded = build(**arguments)
    else:
        loaded = load_function(value, key=name)
        # The functions of this package build rules. A resumed run would not see that the arguments
        # of a rule changed if they were in another file.
        if _is_ours(loaded):
            remedy = "give a block with a _component_ of adaptive_batch.schedules and its arguments"
            raise SettingError(name, value, remedy)
    check_rule(name, loaded)
    return loaded


def _is_ours(loaded: object) -> bool:
    """Return whether this package defines a function, a class or the class of an object."""
    return str(getattr(loaded, "__module__", "")).startswith("adaptive_batch.schedules")


def load_function(path: object, *, key: str) -> Any:
    """Import the object of a dotted path.

    Raises:
        SettingError: it cannot be imported; the message has names near a missing one, or
            torchtune's reason.
    """
    if not isinstance(path, str):
        remedy = "give the dotted path of a function, such as my_module.my_function"
        raise SettingError(key, path, remedy)
    try:
        return _get_component_from_path(path)
    except Exception as error:
        remedy = (
            f"it cannot be imported: {one_line(error)}; correct the name, or put the folder of its"
            " module on PYTHONPATH"
        )
        # torchtune tries a name that a module lacks as a submodule, `missing`.
        missing = str(getattr(error.__cause__, "name", ""))
        module, _, name = missing.rpartition(".")
        if module in sys.modules and f"{path}.".startswith(f"{missing}."):
            names = [each for each in dir(sys.modules[module]) if not each.startswith("_")]
            remedy = f"there is no {name} in {module}; {nearest(name, names)}"
        raise SettingError(key, path, REMOVED.get(path, remedy)) from error

"""Configurations as plain values, and their errors as one line."""

from __future__ import annotations

import errno
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from torchtune import config
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _merge_yaml_and_cli_args
from yaml import YAMLError  # type: ignore[import-untyped]  # it comes with OmegaConf

from adaptive_batch._util import file_signature
from adaptive_batch.errors import AdaptiveBatchError, SettingError

# Errors of files and arguments that cannot be parsed.
_READING_ERRORS = (YAMLError, OSError, TypeError, ValueError, OmegaConfBaseException)

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
    """Return a configuration as dicts and lists, with references resolved."""
    plain: Any = cfg
    if isinstance(cfg, DictConfig):
        try:
            plain = OmegaConf.to_container(cfg, resolve=True)
        except OmegaConfBaseException as error:
            raise plainly(error) or error from error
    return {str(key): value for key, value in plain.items()}


def component_files(value: object) -> list[Any]:
    """Return a signature of each file that a dotted path of a configuration names, nested values
    included.

    The content of a component's module counts; modules that it imports do not.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [found for part in value for found in component_files(part)]
    module = sys.modules.get(str(value).rpartition(".")[0])
    file = getattr(module, "__file__", None)
    return [[str(value), file_signature(file)]] if file else []


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
    for block in value if several and isinstance(value, list) and value else [value]:
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
    """Context manager: turn errors of a component into a SettingError of its key."""
    try:
        yield
    except (AdaptiveBatchError, OmegaConfBaseException):
        raise
    except Exception as error:
        # User code and libraries raise any kind of error.
        message = one_line(error)
        if not isinstance(error, InstantiationError):
            message = f"{type(error).__name__}: {message}"
        if isinstance(error, ModuleNotFoundError) and error.name:
            remedy = f"pip install {error.name}"
        raise SettingError(key, value, f"{problem}: {message}; {remedy}") from error


def instantiate(key: str, block: DictConfig, *arguments: Any, **more: Any) -> Any:
    """Build the component of a block of the configuration.

    Raises:
        SettingError: it cannot be built with the values of the block.
    """
    with refusing(key, block.get("_component_")):
        return config.instantiate(block, *arguments, **more)


def plainly(error: BaseException) -> AdaptiveBatchError | None:
    """Return an error of the configuration or of a full disk as one of ours, or None."""
    if isinstance(error, AdaptiveBatchError):
        return error
    plain: AdaptiveBatchError
    if isinstance(error, OmegaConfBaseException):
        key = str(error.full_key or error.key or "config")
        plain = missing(key)
        if not isinstance(error, ConfigAttributeError | ConfigKeyError | MissingMandatoryValue):
            remedy = f"{str(error).partition(chr(10))[0]}; give it a value of its own"
            plain = SettingError(key, None, remedy)
    elif isinstance(error, InstantiationError):
        plain = SettingError("_component_", None, one_line(error))
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        # Writing a log raises it; checkpoints have their own error.
        resumes = "resume_from_checkpoint=True resumes from what was saved, if anything was"
        plain = AdaptiveBatchError(f"{error.strerror}: free disk space in output_dir; {resumes}")
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


def check_file(path: str, arguments: Sequence[str] = ()) -> None:
    """Raise SettingError for a file that is not a YAML block, and for an invalid argument."""
    with _reading("--config", path):
        cfg: Any = OmegaConf.load(path)
    are_names = all(isinstance(key, str) and key != "config" for key in cfg)
    if not (isinstance(cfg, DictConfig) and are_names):
        remedy = "give a block of keys, as in torchtune's configs, with names other than config"
        raise SettingError("--config", path, remedy)
    # An argument may replace a key that another removes.
    for argument in sorted(arguments, key=lambda argument: not argument.startswith("~")):
        with _reading("argument", argument):
            cfg = merged(cfg, [argument])


def merged(cfg: DictConfig, arguments: Sequence[str]) -> Any:
    """Return a copy of a configuration with torchtune's command-line arguments applied."""
    values: Any = OmegaConf.to_container(cfg)
    return _merge_yaml_and_cli_args(Namespace(**values), [*arguments])


@contextmanager
def _reading(key: str, value: str) -> Iterator[None]:
    try:
        yield
    except _READING_ERRORS as error:
        raise SettingError(key, value, f"it cannot be read: {one_line(error)}") from error

"""What a configuration key is, and how its value is read.

A key is one field of a frozen dataclass (:mod:`.settings`): the field has its name, type and
default, and the :class:`Key` that it carries has the rest. What needs to know about keys derives it
from these fields: names that are refused, settings that have no effect (:mod:`.checks`), changes on
resuming (:mod:`.resumed_run`), the tables of docs/configuration.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from importlib import import_module
from typing import Any, Literal, TypeVar

from adaptive_batch._util import check_choice, check_whole, nearest
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import EXAMPLES

from .removed_keys import REMOVED_FUNCTIONS

Resume = Literal["free", "report", "epoch", "refuse"]
T = TypeVar("T")

# Keys of torchtune's full fine-tune configs by what a change of them does on resuming. One that
# looks like ours is still torchtune's.
_THEIRS: Mapping[Resume, str] = {
    "refuse": "dataset model lr_scheduler",
    "epoch": "shuffle",
    "report": (
        "gradient_accumulation_steps dtype loss clip_grad_norm enable_activation_checkpointing "
        "enable_activation_offloading compile ref_checkpointer teacher_model teacher_checkpointer "
        "kd_loss kd_ratio"
    ),
    "free": (
        "ac_mode ac_option batch_size checkpointer collate_fn cudnn_deterministic_mode"
        " custom_sharded_layers device enable_async_checkpointing epochs fsdp_cpu_offload"
        " fsdp_reshard_after_forward log_every_n_steps log_peak_memory_stats low_cpu_ram"
        " max_steps_per_epoch metric_logger optimizer optimizer_in_bwd output_dir profiler"
        " resume_from_checkpoint save_adapter_weights_only seed tensor_parallel_dim"
        " tensor_parallel_plan tokenizer"
    ),
}
TORCHTUNE_KEYS: Mapping[str, Resume] = {
    name: policy for policy, names in _THEIRS.items() for name in names.split()
}


@dataclass(frozen=True)
class Key:
    """What a configuration key is besides its name, type and default.

    Attributes:
        read: called with the key's name and the value it was given; returns what the setting is, or
            raises SettingError.
        doc: its meaning, for the table in docs/configuration.md; empty for a key of torchtune's
            that the table leaves out.
        shown: the default as the table shows it, where that is not the field's.
        needs: keys of which one must be set for this top-level key to have an effect; ``key=value``
            asks for that value.
        resume: what a value other than the checkpoint's does: ``refuse`` is an error unless
            `resume_allow_changes` lists the key; ``epoch`` is one within an epoch, since it changes
            which rows come when, and is logged between epochs; ``report`` is logged.
        fills_steps: with `batch_tokens` it decides which rows a step holds, so that a change is
            also treated as ``epoch``.
    """

    read: Callable[[str, Any], Any]
    doc: str
    shown: str = ""
    needs: tuple[str, ...] = ()
    resume: Resume = "free"
    fills_steps: bool = False


def key(
    read: Callable[[str, Any], Any], doc: str = "", *, default: Any = MISSING, **more: Any
) -> Any:
    """Return the dataclass field of a key, which must be given where it has no default; for the
    arguments see :class:`Key`.
    """
    return field(default=default, metadata={"key": Key(read, doc, **more)})


def group(keys: type) -> Any:
    """Return the dataclass field of keys that are one object of the settings, though the
    configuration has each of them at its top.
    """
    return field(default=keys(), metadata={"group": keys})


def fields_of(block: type) -> dict[str, Field[Any]]:
    """Return the fields of the keys of a dataclass of settings, groups included, by name."""
    named: dict[str, Field[Any]] = {}
    for own_field in fields(block):
        if "group" in own_field.metadata:
            named |= fields_of(own_field.metadata["group"])
        else:
            named[own_field.name] = own_field
    return named


def keys_of(block: type) -> dict[str, Key]:
    """Return the keys of a dataclass of settings, groups included, by name."""
    return {name: key_field.metadata["key"] for name, key_field in fields_of(block).items()}


def values_of(settings: Any) -> dict[str, Any]:
    """Return the values of all keys of settings, groups included, by name."""
    values: dict[str, Any] = {}
    for own_field in fields(settings):
        value = getattr(settings, own_field.name)
        values |= values_of(value) if "group" in own_field.metadata else {own_field.name: value}
    return values


def read_keys(block: type, config: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Read and check what is given of the keys of a dataclass; null is as good as absent."""
    values: dict[str, Any] = {}
    for own_field in fields(block):
        name = own_field.name
        keys = own_field.metadata.get("group")
        if keys is not None:
            values[name] = keys(**read_keys(keys, config))
            continue
        value = config.get(name)
        if own_field.default is MISSING or value is not None:
            values[name] = own_field.metadata["key"].read(prefix + name, value)
    return values


def block(keys: type[T]) -> Callable[[str, Any], T]:
    """Return the reader of a key whose value is a block of keys, which a dataclass has."""

    def read(name: str, value: Any) -> T:
        names = list(keys_of(keys))
        if not isinstance(value, Mapping):
            raise SettingError(name, value, f"give a block of keys, such as {name}.{names[0]}=...")
        for key in value:
            if key not in names:
                full_name = f"{name}.{key}"
                remedy = f"there is no such key; {nearest(str(key), names)}"
                raise SettingError(full_name, value[key], remedy)
        return keys(**read_keys(keys, value, prefix=f"{name}."))

    return read


def table(block: type, *, prefix: str = "") -> str:
    """Return the keys of a dataclass as a table in Markdown."""
    rows = [
        f"| `{prefix}{field.name}` | {_default(field)} | {field.metadata['key'].doc} |"
        for field in fields_of(block).values()
        if field.metadata["key"].doc
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def _default(field: Field[Any]) -> str:
    shown: str = field.metadata["key"].shown
    if shown:
        return shown
    if field.default is None:
        return "null"
    return f"`{field.default}`"


# --- how a value is read


def one_of(*options: str) -> Callable[[str, Any], Any]:
    """Return the reader of a key whose value is one of some words."""
    return checked(partial(check_choice, options=options))


def auto_or_whole(name: str, value: Any) -> int | str:
    """Read ``auto`` or a whole number, 1 or more."""
    if value == "auto":
        return "auto"
    return check_whole(name, value, remedy="give auto, or a whole number, 1 or more")


def names_of_keys(name: str, value: Any) -> tuple[str, ...]:
    """Read one name, or a list of them."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(
        isinstance(name_of_key, str) for name_of_key in names
    ):
        raise SettingError(name, value, "give the names of keys, such as [dataset]")
    return tuple(names)


def checked(check: Callable[[str, Any], object]) -> Callable[[str, Any], Any]:
    """Return the reader of a key whose value is taken as it is once `check` lets it pass."""

    def read(name: str, value: Any) -> Any:
        check(name, value)
        return value

    return read


def function(check: Callable[..., None]) -> Callable[[str, Any], Any]:
    """Return the reader of a key that names a function, by a dotted path or by a block whose
    `_component_` builds one.
    """

    def read(name: str, value: Any) -> Any:
        loaded = _load(value, key=name)
        for builder, example in EXAMPLES.items():
            if builder is loaded:
                block = f"{name}={{_component_: {value}, {example}}}"
                raise SettingError(name, value, f"it builds the function; give a block: {block}")
        check(loaded, key=name)
        return loaded

    return read


def load_function(path: object, *, key: str) -> Any:
    """Import what a dotted path names; refuse one that cannot be imported, with what is missing."""
    replacement = REMOVED_FUNCTIONS.get(str(path))
    if replacement is not None:
        raise SettingError(key, path, f"this function was removed; {replacement}")
    parts = path.split(".") if isinstance(path, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise SettingError(
            key, path, "give the dotted path of a function, such as my_module.my_function"
        )
    for split in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:split])
        try:
            loaded: Any = import_module(module)
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
                continue
            reason = str(error)
            if not isinstance(error, ImportError):
                reason = f"{type(error).__name__}: {reason}"
            raise SettingError(key, path, f"importing {module} failed: {reason}") from error
        for part in parts[split:]:
            if not hasattr(loaded, part):
                names = [name for name in dir(loaded) if not name.startswith("_")]
                raise SettingError(key, path, f"{module} has no {part}; {nearest(part, names)}")
            loaded = getattr(loaded, part)
        return loaded
    remedy = "run from the folder that holds it, or put that folder on PYTHONPATH"
    raise SettingError(key, path, f"no module {parts[0]} can be imported; {remedy}")


def _load(value: object, *, key: str) -> Any:
    if isinstance(value, str):
        return load_function(value, key=key)
    if isinstance(value, Mapping) and isinstance(value.get("_component_"), str):
        build = load_function(value["_component_"], key=f"{key}._component_")
        arguments = {str(k): v for k, v in value.items() if k != "_component_"}
        try:
            return build(**arguments)
        except SettingError:
            raise
        except (Exception, SystemExit) as error:
            raise SettingError(
                f"{key}._component_",
                value["_component_"],
                f"it is called with {arguments} to build the function, and failed: {error}; "
                f"for a function itself write {key}: {value['_component_']}",
            ) from error
    raise SettingError(
        key,
        value,
        "give the dotted path of a function, or a block with _component_ that builds one",
    )

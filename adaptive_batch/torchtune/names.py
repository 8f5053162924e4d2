"""The names of keys: which are read, and what is probably meant by one that nothing reads."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adaptive_batch.errors import SettingError

from .keys import RENAMED, TORCHTUNE_KEYS, keys_of

_OF_OTHER_RECIPES = {
    "quantizer": "weights are trained as they are here, with nothing quantized (QAT is torchtune's qat_distributed)",
    "teacher_model": "nothing is distilled here (torchtune's knowledge_distillation recipes do)",
    "ref_checkpointer": "there are no preferences to train on here (torchtune's full_dpo_distributed does it)",
    "policy_model": "there is no reinforcement learning here (torchtune's ppo_full_finetune_single_device does it)",
}


def check_names(settings: type, config: Mapping[str, Any] | DictConfig) -> None:
    """Refuse the keys of another recipe, and those that nothing reads and that are nearly one that is read.

    Args:
        settings: the dataclass of the top-level keys that are ours.
        config: as it was given, with its references.
    """
    for key, why in _OF_OTHER_RECIPES.items():
        if config.get(key) is not None:
            given = config[key]
            component = given.get("_component_") if isinstance(given, Mapping) else given
            raise SettingError(key, component, f"{why}; remove it, and every weight is trained")
    for name in unread(settings, config):
        bare = name.lstrip("+-~")
        value = config[name]
        if bare != name:
            raise SettingError(
                name, value, f"write {bare}, without {name.removesuffix(bare)}; a new key is set so, too"
            )
        if bare in RENAMED:
            raise SettingError(name, value, f"there is no such key; {RENAMED[bare]} is meant")
        if meant := _nearly(bare, settings, config):
            raise SettingError(name, value, f"there is no such key; {' or '.join(meant)} is probably meant")


def unread(settings: type, config: Mapping[str, Any] | DictConfig) -> list[str]:
    """Return the top-level keys that neither we nor torchtune read, and that no other value refers to."""
    plain = OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else config
    read = {*_known(settings), *_referred_to(plain)}
    return [str(name) for name in config if str(name) not in read]


def describe_unread(settings: type, names: Iterable[str]) -> str:
    """Return why keys that nothing reads have no effect, with what is near each of them."""
    near = {name: difflib.get_close_matches(name, _known(settings), n=1) for name in names}
    known = ", ".join(f"{found[0]} is near {name}" for name, found in near.items() if found)
    return f"nothing reads {'it' if len(near) == 1 else 'them'}" + (f" ({known})" if known else "")


def _known(settings: type) -> list[str]:
    return list(dict.fromkeys([*keys_of(settings), *TORCHTUNE_KEYS]))


def _nearly(name: str, settings: type, config: Mapping[str, Any]) -> list[str]:
    """Return the keys that a name is nearly: of a block, the one that is spelt like it, or those whose words it has."""
    plain, known = name.lower().replace("-", "_"), _known(settings)
    if of_block := [f"{key}.{each}" for key, each in _inner(settings, config) if plain in (each, f"{key}_{each}")]:
        return of_block[:2]
    # 0.77 sees lr_scaling in lr_scale, and leaves compile_mode (0.74 of compile) to its owner
    if spelt := difflib.get_close_matches(plain, known, n=1, cutoff=0.77):
        return spelt
    words = [word for word in plain.split("_") if word]
    by_words = [each for each in known if _has_words(each, words)]
    return difflib.get_close_matches(plain, by_words, n=2, cutoff=0.0)


def _has_words(key: str, words: list[str]) -> bool:
    """Whether each of some words is one of a key's, perhaps shortened, or initials of it; or the key's two and more are among them."""
    own = key.split("_")
    initials = "".join(word[0] for word in own)

    def is_its(word: str) -> bool:
        return word in own or (len(word) > 2 and (word in initials or any(each.startswith(word) for each in own)))

    return (bool(words) and all(map(is_its, words))) or (len(own) > 1 and set(own) <= set(words))


def _inner(settings: type, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield block and name of the keys in our blocks, and in those of the configuration."""
    for each in fields(settings):
        if is_dataclass(each.default):
            yield from ((each.name, of_block.name) for of_block in fields(each.default) if of_block.metadata)
    for key, block in config.items():
        if isinstance(block, Mapping):
            yield from ((str(key), str(name)) for name in block if str(key) not in keys_of(settings))


def _referred_to(value: object) -> Iterator[str]:
    """Yield the top-level names that the references in a value may mean."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _referred_to(one)
    for reference in re.findall(r"\$\{([^}]*)", value if isinstance(value, str) else ""):
        # ${model.embed_dim} means the model; of ${resolver:...} any word may be a name
        names = re.findall(r"[\w-]+", reference)
        yield from names if ":" in reference or "${" in reference else names[:1]

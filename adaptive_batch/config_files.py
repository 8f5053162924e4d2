"""The shipped configurations.

A wheel has them in ``adaptive_batch/configs``; a checkout (and an editable install) in ``configs``
next to the package.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from adaptive_batch._util import nearest
from adaptive_batch.errors import SettingError

_PACKAGE = Path(__file__).resolve().parent


def _folder() -> Path:
    """Return the folder of the shipped configurations."""
    in_wheel = _PACKAGE / "configs"
    if in_wheel.is_dir():
        return in_wheel
    return _PACKAGE.parent / "configs"


def config_path(name: str) -> Path | None:
    """Return the file of a shipped configuration, or None if the name is unknown.

    Args:
        name: file name without ``.yaml``, such as ``demo_cpu``.
    """
    return {path.stem: path for path in _folder().glob("*.yaml")}.get(name)


def shipped_configs() -> list[tuple[str, str]]:
    """Return the name and the first line of every shipped configuration, sorted by name."""
    configs = []
    for path in sorted(_folder().glob("*.yaml")):
        first_line = path.read_text(encoding="utf-8").partition("\n")[0]
        configs.append((path.stem, first_line.removeprefix("#").strip()))
    return configs


def copy_config(name: str, destination: str | Path) -> Path:
    """Copy a shipped configuration for editing.

    Args:
        name: name of the configuration.
        destination: an existing folder, or the path of the new file.

    Returns:
        The path of the new file.

    Raises:
        SettingError: the name is unknown, the file exists already, or its folder does not exist.
    """
    source = config_path(name)
    if source is None:
        names = [shipped for shipped, _ in shipped_configs()]
        raise SettingError("NAME", name, f"unknown configuration; {nearest(name.lower(), names)}")
    target = Path(destination)
    if target.is_dir():
        target = target / source.name
    try:
        # Mode "x" is atomic: simultaneous copies cannot overwrite each other.
        with source.open("rb") as original, target.open("xb") as copy:
            shutil.copyfileobj(original, copy)
    except FileExistsError:
        raise SettingError(
            "DEST", str(target), "the file exists already; give another name"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise SettingError(
            "DEST", str(target), f"the folder {target.parent} does not exist; create it"
        ) from None
    return target

"""The configurations that come with the package: found by name, listed, copied.

In a wheel they are in ``adaptive_batch/configs``; in a checkout, and so in an editable install, in
``configs`` next to the package.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from adaptive_batch._util import nearest
from adaptive_batch.errors import SettingError

_PACKAGE = Path(__file__).resolve().parent


def _folder() -> Path:
    """Return where the shipped configurations are in this installation."""
    in_wheel = _PACKAGE / "configs"
    if in_wheel.is_dir():
        return in_wheel
    return _PACKAGE.parent / "configs"


def config_path(name: str) -> Path | None:
    """Return the file of a shipped configuration, or None where there is none of that name.

    Args:
        name: the file's name without ``.yaml``, as ``demo_cpu``.
    """
    return {path.stem: path for path in _folder().glob("*.yaml")}.get(name)


def shipped_configs() -> list[tuple[str, str]]:
    """Return the name and one line of every shipped configuration, sorted by name."""
    configs = []
    for path in sorted(_folder().glob("*.yaml")):
        first_line = path.read_text(encoding="utf-8").partition("\n")[0]
        configs.append((path.stem, first_line.removeprefix("#").strip()))
    return configs


def copy_config(name: str, destination: str | Path) -> Path:
    """Copy a shipped configuration to where it can be edited; an existing file is never
    overwritten.

    Args:
        name: which configuration.
        destination: a folder that is there, or the path of the new file.

    Raises:
        SettingError: there is no configuration of that name, or the destination is there already,
            or its folder is not.
    """
    source = config_path(name)
    if source is None:
        names = [shipped for shipped, _ in shipped_configs()]
        raise SettingError(
            "NAME", name, f"no such configuration is shipped; {nearest(name.lower(), names)}"
        )
    target = Path(destination)
    if target.is_dir():
        target = target / source.name
    try:
        # Mode "x" looks and makes in one act: two copies at once cannot overwrite each other.
        with source.open("rb") as original, target.open("xb") as copy:
            shutil.copyfileobj(original, copy)
    except FileExistsError:
        raise SettingError(
            "DEST", str(target), "is there already, and is not overwritten; give another name"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise SettingError(
            "DEST", str(target), f"there is no folder {target.parent}; make it first"
        ) from None
    return target

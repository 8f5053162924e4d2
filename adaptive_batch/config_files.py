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


def config_files() -> dict[str, Path]:
    """Return the files of the shipped configurations by name, such as ``demo_cpu``, sorted."""
    folder = _PACKAGE / "configs"
    if not folder.is_dir():
        folder = _PACKAGE.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def shipped_configs() -> list[tuple[str, str]]:
    """Return the name and the first line of every shipped configuration, sorted by name."""
    configs = []
    for name, path in config_files().items():
        first_line = path.read_text(encoding="utf-8").partition("\n")[0]
        configs.append((name, first_line.removeprefix("#").strip()))
    return configs


def copy_config(name: str, destination: str | Path | None) -> Path:
    """Copy a shipped configuration for editing.

    Args:
        name: name of the configuration.
        destination: an existing folder, or the path of the new file.

    Returns:
        The path of the new file.

    Raises:
        SettingError: the name is unknown, there is no destination, the file exists already, or its
            folder does not exist.
    """
    files = config_files()
    if name not in files:
        remedy = f"unknown configuration; {nearest(name.lower(), [*files])}"
        raise SettingError("NAME", name, remedy)
    if destination is None:
        raise SettingError("DEST", None, f"give a destination: configs {name} DEST")
    source = files[name]
    target = Path(destination)
    if target.is_dir():
        target = target / source.name
    try:
        # Mode "x" is atomic: simultaneous copies cannot overwrite each other.
        with source.open("rb") as original, target.open("xb") as copy:
            shutil.copyfileobj(original, copy)
    except OSError as error:
        remedy = f"it cannot be created: {error.strerror}; give a new file in an existing folder"
        raise SettingError("DEST", str(target), remedy) from None
    return target

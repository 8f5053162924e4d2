"""What is installed here, what is wrong with it, and the command that fixes it: ``python -m adaptive_batch check``.

``tune`` ends with "torchao not installed" when torchao is missing, and with the same words when a torchao is there that cannot be
imported, before any recipe is loaded. So this works where neither torch nor torchtune can be imported. The versions asked for are those of
pyproject.toml, as the installed package states them.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:  # torchtune's requirements bring it; without them, that is one of the findings
    Requirement = None  # type: ignore[assignment, misc]

_PACKAGE = "adaptive-batch"
_INSTALL_US = "pip install --editable '.[recipes]', in the checkout"
_OPTIONAL = "bitsandbytes>=0.43"  # only bitsandbytes.optim needs it


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `fix` is the command, or the act, that puts it right, and None where nothing is wrong."""

    subject: str
    found: str
    fix: str | None = None

    def __str__(self) -> str:
        return f"WRONG  {self.found}; fix it with: {self.fix}" if self.fix else f"ok     {self.found}"


def check(write: Callable[[str], None] = print) -> bool:
    """Look at everything, print what was found, and return whether all of it is right."""
    found = [*check_versions(), check_import(), *check_commands(), *check_devices()]
    width = max(len(finding.subject) for finding in found)
    for finding in found:
        write(f"{finding.subject:<{width}}  {finding}")
    return not any(finding.fix for finding in found)


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_versions(version: Callable[[str], str | None] = installed_version) -> Iterator[Finding]:
    """Yield one finding for Python and one for each distribution that the recipes need.

    Args:
        version: returns the version of a distribution, and of ``python``; None where it is not installed.
    """
    python, required = version("python") or platform.python_version(), _required()
    if Requirement is None or not required:
        yield Finding("python", python)
        missing = "packaging" if Requirement is None else _PACKAGE
        yield Finding(missing, "not installed, so no versions are compared", _INSTALL_US)
        return
    for text in (f"python{metadata.metadata(_PACKAGE)['Requires-Python']}", *required.values(), _OPTIONAL):
        wanted = Requirement(text)
        found = python if wanted.name == "python" else version(wanted.name)
        if found is not None and wanted.specifier.contains(found, prereleases=True):
            yield Finding(wanted.name, found)
        elif found is None and text == _OPTIONAL:
            yield Finding(wanted.name, f"not installed; only {wanted.name}.optim needs it")
        else:
            fix = "make a new environment with another Python" if wanted.name == "python" else f"pip install '{text}'"
            yield Finding(wanted.name, f"{found}, but {wanted.specifier} is needed" if found else "not installed", fix)


def check_import(error: str | None = None, version: Callable[[str], str | None] = installed_version) -> Finding:
    """Return whether torchtune can be imported and, if not, which distribution is at fault.

    torchtune reports every ImportError inside torchao as "torchao not installed"; the cause is the error that Python printed first.

    Args:
        error: what the import printed, empty where it worked; None tries it in a process of its own, as ``tune`` does.
        version: returns the version of a distribution; None where it is not installed.
    """
    error = import_error("torchtune") if error is None else error
    if not error:
        return Finding("import torchtune", "works")
    lines = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*", error, re.MULTILINE)
    found = "fails: " + (lines[:1] or error.strip().splitlines()[-1:])[0].strip()
    missing = re.search(r"No module named '(\w+)'", error)
    at_fault = "torchtune"
    if absent := next((name for name in ("torchtune", "torchao") if version(name) is None), None):
        at_fault, found = absent, f"fails: {absent} is not installed"
    elif re.search(r"[/\\]torchao[/\\]|torchao not installed|['\"]torchao\b", error):
        at_fault, found = "torchao", f"{found} (torchao {version('torchao')})"
    elif missing and missing[1] in _required():
        return Finding("import torchtune", found, f"pip install '{_required()[missing[1]]}'")
    return Finding("import torchtune", found, _fix(at_fault, version))


def import_error(module: str, *, timeout_seconds: float = 300) -> str:
    """Import a module in a process of its own; return what it printed if that failed, and nothing if it worked."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"TimeoutError: not done after {timeout_seconds:.0f} s"
    return (done.stderr.strip() or "no message") if done.returncode else ""


def check_commands() -> list[Finding]:
    """Return whether ``tune run adaptive_full_finetune`` can be typed."""
    scripts = (str(Path(sys.executable).parent), sysconfig.get_path("scripts"))
    own = next((tune for path in scripts if (tune := shutil.which("tune", path=path))), None)
    recipe = Finding("adaptive_full_finetune", "found")
    if importlib.util.find_spec(recipe.subject) is None:
        recipe = Finding(recipe.subject, "not found by this Python", _INSTALL_US)
    return [recipe, check_tune(own, on_path=shutil.which("tune"))]


def check_tune(own: str | None, *, on_path: str | None) -> Finding:
    """Return whether this Python has a ``tune`` of its own, and whether the shell runs that one."""
    if own is not None and own == on_path:
        return Finding("tune", own)
    if own is not None:
        return Finding("tune", f"{own}; call it by this path, for PATH has {on_path or 'none'}")
    return Finding("tune", f"not installed for {sys.executable}; PATH has {on_path or 'none'}", _fix("torchtune"))


def check_devices() -> Iterator[Finding]:
    """Yield one finding for the CPU and one for each accelerator that torch sees."""
    try:
        import torch

        from adaptive_batch.memory import GIB, device_memory, host_available_bytes
    except Exception as error:
        yield Finding("torch", f"cannot be imported: {error}", _fix("torch"))
        return
    total = device_memory(torch.device("cpu")).total_bytes()
    yield Finding("cpu", f"{total / GIB:.1f} GiB, {host_available_bytes() / GIB:.1f} GiB of it available")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        kind = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        yield Finding("accelerator", f"none is seen by torch {torch.__version__}, {kind}")
        return
    for index in range(torch.accelerator.device_count()):
        device = torch.device(accelerator.type, index)
        try:
            memory = device_memory(device)
            yield Finding(
                str(device), f"{memory.describe()}, {memory.available_bytes([]) / GIB:.1f} GiB of it available"
            )
        except RuntimeError as error:  # torch sees it and cannot use it: a driver too old, no memory left for a context
            reason = str(error).strip().splitlines()[0]
            yield Finding(str(device), f"cannot be used: {reason}", "nvidia-smi, which shows what holds the device")


def _required() -> dict[str, str]:
    """Return what the recipes need, by name, as pyproject.toml states it; empty where the package is not installed."""
    try:
        every = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return {}
    asked = (text.partition(";") for text in every)
    needed = [text.strip() for text, _, marker in asked if not marker or "recipes" in marker]
    return {re.split(r"[^\w-]", text)[0]: text for text in needed}


def _fix(name: str, version: Callable[[str], str | None] = installed_version) -> str:
    """Return the command that installs a distribution; where a version that would do is installed, and so is broken, that one again."""
    wanted, found = _required().get(name, name), version(name)
    if found and Requirement is not None and Requirement(wanted).specifier.contains(found, prereleases=True):
        return f"pip install --force-reinstall --no-deps '{name}=={found}'"
    return f"pip install '{wanted}'"

"""What is installed here, what is wrong with it, and the command that fixes it: ``python -m adaptive_batch check``.

``tune`` ends with "torchao not installed" when torchao is missing, and with the same words when a torchao is there that cannot be
imported, before any recipe is loaded. So this works where neither torch nor torchtune can be imported.
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

Version = Callable[[str], str | None]


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


def check_versions(version: Version = installed_version) -> Iterator[Finding]:
    """Yield one finding for Python and one for each distribution that the recipes need."""
    required = _required()
    if not required:
        missing = "packaging" if Requirement is None else _PACKAGE
        yield Finding(missing, "not installed, so no versions are compared", _INSTALL_US)
        return
    python = Requirement(f"python{metadata.metadata(_PACKAGE)['Requires-Python']}")
    for wanted in (python, *required.values(), Requirement(_OPTIONAL)):
        name, found = wanted.name, version(wanted.name)
        if name == "python":
            found = found or platform.python_version()
        if found is None and str(wanted) == _OPTIONAL:
            yield Finding(name, f"not installed; only {name}.optim needs it")
        elif found is None or not wanted.specifier.contains(found, prereleases=True):
            fix = "make a new environment with another Python" if name == "python" else _fix(name, version, wanted)
            yield Finding(name, f"{found}, but {wanted.specifier} is needed" if found else "not installed", fix)
        else:
            yield Finding(name, found)


def check_import(error: str | None = None, version: Version = installed_version) -> Finding:
    """Return whether torchtune can be imported and, if not, which distribution is at fault.

    torchtune reports every ImportError inside torchao as "torchao not installed"; the cause is the error that Python printed
    first. `error` is what the import printed, empty where it worked; None tries it in another process, as ``tune`` does.
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
        at_fault = missing[1]
    return Finding("import torchtune", found, _fix(at_fault, version))


def import_error(module: str, *, timeout_seconds: float = 300) -> str:
    """Import a module in another process; return what it printed if that failed, and nothing if it worked."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"TimeoutError: not done after {timeout_seconds:.0f} s"
    return (done.stderr.strip() or "no message") if done.returncode else ""


def check_commands() -> Iterator[Finding]:
    """Yield whether the recipes are found, and ``tune``."""
    is_found = importlib.util.find_spec("adaptive_full_finetune") is not None
    found = ("found", None) if is_found else ("not found by this Python", _INSTALL_US)
    yield Finding("adaptive_full_finetune", *found)
    scripts = (str(Path(sys.executable).parent), sysconfig.get_path("scripts"))
    own = next((tune for path in scripts if (tune := shutil.which("tune", path=path))), None)
    yield check_tune(own, on_path=shutil.which("tune"))


def check_tune(own: str | None, *, on_path: str | None) -> Finding:
    """Return whether this Python has a ``tune``, and whether the shell runs that one."""
    if own is None:
        return Finding("tune", f"not installed for {sys.executable}; PATH has {on_path or 'none'}", _fix("torchtune"))
    return Finding("tune", own if own == on_path else f"{own}; call it by this path, for PATH has {on_path or 'none'}")


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
            found = f"{memory.describe()}, {memory.available_bytes([]) / GIB:.1f} GiB of it available"
            yield Finding(str(device), found)
        except RuntimeError as error:  # torch sees it and cannot use it: a driver too old, no memory left for a context
            reason = str(error).strip().splitlines()[0]
            yield Finding(str(device), f"cannot be used: {reason}", "nvidia-smi, which shows what holds the device")


def _required() -> dict[str, Requirement]:
    """Return what the recipes need, by name, as the installed package states it; empty where that cannot be read."""
    try:
        every = [Requirement(text) for text in metadata.requires(_PACKAGE) or [] if Requirement is not None]
    except metadata.PackageNotFoundError:
        return {}
    return {one.name: one for one in every if not one.marker or one.marker.evaluate({"extra": "recipes"})}


def _fix(name: str, version: Version = installed_version, wanted: Requirement | None = None) -> str:
    """Return the command that installs a distribution; where a version that would do is installed, and so is broken, that one again."""
    wanted, found = wanted or _required().get(name), version(name)
    if found and wanted and wanted.specifier.contains(found, prereleases=True):
        return f"pip install --force-reinstall --no-deps '{name}=={found}'"
    return f"pip install '{name}{wanted.specifier if wanted else ''}'"

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:  # torchtune's requirements bring it; without them, that is one of the findings
    Requirement = None  # type: ignore[assignment, misc]

_PACKAGE = "adaptive-batch"
_INSTALL_US = "pip install --editable '.[recipes]', in the checkout"
_OPTIONAL = ("bitsandbytes>=0.43",)  # only bitsandbytes.optim needs it


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
    python = version("python") or platform.python_version()
    required = _required()
    if Requirement is None or not required:
        yield Finding("python", python)
        missing = "packaging" if Requirement is None else _PACKAGE
        yield Finding(missing, "not installed, so no versions are compared", _INSTALL_US)
        return
    for text in (f"python{metadata.metadata(_PACKAGE)['Requires-Python']}", *required, *_OPTIONAL):
        wanted = Requirement(text)
        name, found = wanted.name, python if wanted.name == "python" else version(wanted.name)
        fix = "make a new environment with another Python" if name == "python" else _install(text)
        if found is None and text in _OPTIONAL:
            yield Finding(name, f"not installed; only {name}.optim needs it")
        elif found is None:
            yield Finding(name, "not installed", fix)
        elif not wanted.specifier.contains(found, prereleases=True):
            yield Finding(name, f"{found}, but {wanted.specifier} is needed", fix)
        else:
            yield Finding(name, found)


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
    for name in ("torchtune", "torchao"):
        if version(name) is None:
            return Finding("import torchtune", f"fails: {name} is not installed", _fix(name, None))
    lines = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*", error, re.MULTILINE)
    what = (lines[:1] or error.strip().splitlines()[-1:] or ["no message"])[0].strip()
    if re.search(r"[/\\]torchao[/\\]|torchao not installed|['\"]torchao\b", error):
        return Finding(
            "import torchtune", f"fails in torchao {version('torchao')}: {what}", _fix("torchao", version("torchao"))
        )
    missing = re.search(r"No module named '([A-Za-z0-9_]+)", error)
    if missing and missing[1] in _by_name():
        return Finding("import torchtune", f"fails: {what}", _fix(missing[1], None))
    return Finding("import torchtune", f"fails: {what}", _fix("torchtune", version("torchtune")))


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
    is_found = importlib.util.find_spec("adaptive_full_finetune") is not None
    return [
        Finding("adaptive_full_finetune", "found") if is_found
        else Finding("adaptive_full_finetune", "not found by this Python", _INSTALL_US),
        check_tune(own, on_path=shutil.which("tune")),
    ]  # fmt: skip


def check_tune(own: str | None, *, on_path: str | None) -> Finding:
    """Return whether this Python has a ``tune`` of its own, and whether the shell runs that one."""
    if own is None:
        other = f"; the one on PATH, {on_path}, is another Python's" if on_path else ""
        return Finding(
            "tune", f"not installed for {sys.executable}{other}", _fix("torchtune", installed_version("torchtune"))
        )
    if own == on_path:
        return Finding("tune", own)
    other = f"PATH has another one, {on_path}" if on_path else "PATH has none"
    return Finding("tune", f"{own}; call it by this path, for {other}")


def check_devices() -> Iterator[Finding]:
    """Yield one finding for the CPU and one for each accelerator that torch sees."""
    try:
        import torch

        from adaptive_batch.memory import GIB, device_memory, host_available_bytes
    except Exception as error:
        yield Finding(
            "torch",
            f"cannot be imported: {str(error).strip() or type(error).__name__}",
            _fix("torch", installed_version("torch")),
        )
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


def _required() -> list[str]:
    """Return what the recipes need, as pyproject.toml states it; empty where the package is not installed."""
    try:
        every = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return []
    asked = (text.partition(";") for text in every)
    return [text.strip() for text, _, marker in asked if not marker or re.search(r"extra == ['\"]recipes['\"]", marker)]


def _by_name() -> Mapping[str, str]:
    return {re.split(r"[^\w-]", text)[0]: text for text in _required()}


def _install(text: str) -> str:
    return f"pip install '{text}'"


def _fix(name: str, version: str | None) -> str:
    """Return the command that installs a distribution, again where an admitted version of it is installed and broken."""
    text = _by_name().get(name, name)
    if version is None or Requirement is None or not Requirement(text).specifier.contains(version, prereleases=True):
        return _install(text)
    return f"pip install --force-reinstall --no-deps '{name}=={version}'"

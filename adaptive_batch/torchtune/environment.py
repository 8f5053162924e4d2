"""What is installed here, what is wrong with it, and the command that mends it.

``tune`` dies with "torchao not installed" when torchao is missing, and with the same words when a torchao is there that
cannot be imported, before any recipe is loaded. So this is asked apart from ``tune``: :func:`judge_versions`,
:func:`judge_import` and :func:`judge_commands` decide, from what the ``collect`` functions saw.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from adaptive_batch.memory import GIB, device_memory, host_available_bytes

_MINIMUM_PYTHON = (3, 10)


@dataclass(frozen=True)
class Requirement:
    """A distribution that the recipes need, as pyproject.toml asks for it.

    Attributes:
        at_least: the first version that will do.
        below: the first version that will not do any more; None where none is known.
        tried: the version that a mending command installs; None for the newest.
        optional: the recipes run without it.
    """

    at_least: str
    below: str | None
    tried: str | None
    optional: bool = False

    def admits(self, version: str) -> bool:
        """Say whether a version is one of those asked for."""
        number = _number(version)
        return _number(self.at_least) <= number and (self.below is None or number < _number(self.below))

    def __str__(self) -> str:
        return f"{self.at_least} or later" + (f", below {self.below}" if self.below else "")


REQUIREMENTS: Mapping[str, Requirement] = {
    "torch": Requirement("2.6", None, "2.13.0"),
    "torchtune": Requirement("0.6.1", "0.6.2", "0.6.1"),
    "torchao": Requirement("0.13", "0.16", "0.15.0"),
    "torchdata": Requirement("0.11.0", "0.11.1", "0.11.0"),
    "omegaconf": Requirement("2.3", "2.5", "2.4.0"),
    "datasets": Requirement("3.0", None, "5.2.0"),
    "tokenizers": Requirement("0.21", None, "0.23.3"),
    "safetensors": Requirement("0.5", None, "0.8.0"),
    "tqdm": Requirement("4.66", None, "4.70.1"),
    "bitsandbytes": Requirement("0.43", None, None, optional=True),
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what was looked at.
        found: what was seen.
        mend: the command, or the act, that puts it right; None where nothing is wrong.
    """

    subject: str
    found: str
    mend: str | None = None

    @property
    def is_wrong(self) -> bool:
        return self.mend is not None


@dataclass(frozen=True)
class ImportResult:
    """How importing torchtune in a process of its own ended.

    Attributes:
        succeeded: it was imported.
        output: what the process wrote to standard error.
    """

    succeeded: bool
    output: str = ""


# ---------------------------------------------------------------------------- decide


def findings(versions: Mapping[str, str | None], torchtune_import: ImportResult) -> list[Finding]:
    """Judge the versions that are installed, and whether torchtune can be imported.

    Args:
        versions: for ``python`` and each name in :data:`REQUIREMENTS`, its version; None where it is not installed.
        torchtune_import: what :func:`try_import` saw.
    """
    return [*judge_versions(versions), judge_import(versions, torchtune_import)]


def judge_versions(versions: Mapping[str, str | None]) -> list[Finding]:
    """One finding for Python and one for each requirement."""
    python = versions["python"] or "?"
    wanted = ".".join(map(str, _MINIMUM_PYTHON))
    old = _number(python) < _MINIMUM_PYTHON
    found = [Finding("python", python, f"make the environment anew with Python {wanted} or later" if old else None)]
    for name, requirement in REQUIREMENTS.items():
        version = versions[name]
        install = _install(name)
        if version is None:
            note = "not installed; only bitsandbytes.optim needs it" if requirement.optional else "not installed"
            found.append(Finding(name, note, None if requirement.optional else install))
        elif not requirement.admits(version):
            found.append(Finding(name, f"{version}, where {requirement} is needed", install))
        else:
            found.append(Finding(name, version))
    return found


def judge_import(versions: Mapping[str, str | None], result: ImportResult) -> Finding:
    """Say whether torchtune can be imported, and if not, whose fault it is.

    torchtune reports every ImportError inside torchao as "torchao not installed"; what happened is the error that Python
    printed first.
    """
    subject = "import torchtune"
    if result.succeeded:
        return Finding(subject, "works")
    if versions["torchtune"] is None:
        return Finding(subject, "fails: torchtune is not installed", _install("torchtune"))
    if versions["torchao"] is None:
        return Finding(subject, "fails: torchao is not installed", _install("torchao"))
    errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*", result.output, re.MULTILINE)
    what = errors[0].strip() if errors else (result.output.strip().splitlines() or ["no message"])[-1].strip()
    torchao = re.search(r"[/\\]torchao[/\\]|torchao not installed|['\"]torchao\b", result.output)
    missing = re.search(r"No module named '([A-Za-z0-9_]+)", result.output)
    if torchao:
        return Finding(
            subject,
            f"fails in torchao {versions['torchao']}: {what}",
            _install("torchao", installed=versions["torchao"]),
        )
    if missing and missing[1] in REQUIREMENTS:
        return Finding(subject, f"fails: {what}", _install(missing[1]))
    return Finding(subject, f"fails: {what}", _install("torchtune", installed=versions["torchtune"]))


def judge_commands(*, recipe_found: bool, tune_beside: str | None, tune_on_path: str | None) -> list[Finding]:
    """Judge whether ``tune run adaptive_full_finetune`` can be typed.

    Args:
        recipe_found: the module ``adaptive_full_finetune`` can be found by this Python.
        tune_beside: the ``tune`` that was installed with this Python, None where there is none.
        tune_on_path: the ``tune`` that the shell would run, None where there is none.
    """
    recipe = Finding(
        "adaptive_full_finetune",
        "found" if recipe_found else "not found by this Python",
        None if recipe_found else "pip install --editable '.[recipes]', in the checkout",
    )
    if tune_beside is None:
        elsewhere = f"; the one on PATH, {tune_on_path}, is another Python's" if tune_on_path else ""
        return [
            recipe,
            Finding(
                "tune",
                f"not installed beside {sys.executable}{elsewhere}",
                _install("torchtune", installed=REQUIREMENTS["torchtune"].tried),
            ),
        ]
    if tune_on_path == tune_beside:
        return [recipe, Finding("tune", tune_beside)]
    other = f"PATH has another one, {tune_on_path}" if tune_on_path else "PATH has none"
    return [recipe, Finding("tune", f"{tune_beside}; call it by this path, for {other}")]


def as_lines(found: list[Finding]) -> list[str]:
    """Findings as aligned text, one line each."""
    width = max(len(finding.subject) for finding in found)
    return [
        f"{finding.subject:<{width}}  "
        + (f"WRONG  {finding.found}; mend it with: {finding.mend}" if finding.is_wrong else f"ok     {finding.found}")
        for finding in found
    ]


def _install(name: str, *, installed: str | None = None) -> str:
    """The command that installs the version that was tried, anew where that very version is installed and broken."""
    tried = REQUIREMENTS[name].tried
    if tried is None:
        return f"pip install --upgrade '{name}>={REQUIREMENTS[name].at_least}'"
    again = "--force-reinstall --no-deps " if installed == tried else ""
    return f"pip install {again}'{name}=={tried}'"


def _number(version: str) -> tuple[int, ...]:
    """The release number of a version, for comparing: ``2.13.0+cpu`` is (2, 13), trailing zeros dropped."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    parts = [int(part) for part in match[0].split(".")] if match else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


# ---------------------------------------------------------------------------- look


def check(say: Callable[[str], None] = print) -> bool:
    """Look at everything, say what was found, and return whether all of it is right."""
    found = [*findings(collect_versions(), try_import("torchtune")), *collect_commands(), *collect_devices()]
    for line in as_lines(found):
        say(line)
    return not any(finding.is_wrong for finding in found)


def collect_versions() -> dict[str, str | None]:
    """The installed version of Python and of each requirement."""

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {"python": platform.python_version(), **{name: version(name) for name in REQUIREMENTS}}


def try_import(module: str, *, timeout_seconds: float = 300) -> ImportResult:
    """Import a module in a process of its own, as ``tune`` would."""
    try:
        finished = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ImportResult(False, f"TimeoutError: not done after {timeout_seconds:.0f} s")
    return ImportResult(finished.returncode == 0, finished.stderr)


def collect_commands() -> list[Finding]:
    """Look for the recipe and for ``tune``."""
    beside = shutil.which("tune", path=str(Path(sys.executable).parent)) or shutil.which(
        "tune", path=sysconfig.get_path("scripts")
    )
    return judge_commands(
        recipe_found=importlib.util.find_spec("adaptive_full_finetune") is not None,
        tune_beside=beside,
        tune_on_path=shutil.which("tune"),
    )


def collect_devices() -> list[Finding]:
    """One finding for the CPU and one for each accelerator that torch sees."""
    cpu = device_memory(torch.device("cpu"))
    found = [
        Finding("cpu", f"{cpu.total_bytes() / GIB:.1f} GiB, {host_available_bytes() / GIB:.1f} GiB of it available")
    ]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        kind = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        found.append(Finding("accelerator", f"none is seen by torch {torch.__version__}, {kind}"))
        return found
    for index in range(torch.accelerator.device_count()):
        device = torch.device(accelerator.type, index)
        try:
            memory = device_memory(device)
            seen = f"{memory.describe()}, {memory.available_bytes([]) / GIB:.1f} GiB of it available"
            found.append(Finding(str(device), seen))
        except RuntimeError as error:  # torch sees it and cannot use it: a driver too old, no memory left for a context
            reason = str(error).strip().splitlines()[0]
            found.append(
                Finding(str(device), f"cannot be used: {reason}", "nvidia-smi, which shows what holds the device")
            )
    return found

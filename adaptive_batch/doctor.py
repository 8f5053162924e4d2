"""Checks of the installation, with a command that fixes each problem: ``adaptive-batch check``.

``tune`` fails with "torchao not installed" before it loads a recipe, even if torchao is installed
but cannot be imported. So this module works without importable torch and torchtune.
"""

from __future__ import annotations

import io
import platform
import shutil
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from importlib import import_module, metadata
from typing import NamedTuple

from adaptive_batch import __version__
from adaptive_batch._util import installed_version

_PACKAGE = "adaptive-batch"


class Finding(NamedTuple):
    """Result of one check, with the command that fixes a problem ("" if there is none)."""

    subject: str
    text: str
    fix: str = ""


def check() -> bool:
    """Print a line for each check and return whether all pass."""
    findings: list[Finding] = []
    for part in (check_versions, check_devices, check_torchtune):
        findings += part()
        # With a wrong version of torch, later checks are meaningless.
        if any(finding.fix for finding in findings):
            break
    width = max(len(finding.subject) for finding in findings)
    for subject, text, fix in findings:
        result = f"WRONG  {text}; fix it with: {fix}" if fix else f"ok     {text}"
        print(f"{subject:<{width}}  {result}")
    return not any(finding.fix for finding in findings)


def check_versions(
    version: Callable[[str], str | None] = installed_version,
) -> Iterator[Finding]:
    """Yield the versions of this package, of Python and of the requirements of the recipes."""
    yield Finding(_PACKAGE, __version__)
    yield Finding("python", platform.python_version())
    try:
        # The core does not need it; torchtune requires it.
        from packaging.requirements import Requirement

        requirements = [Requirement(text) for text in metadata.requires(_PACKAGE) or ()]
    except ImportError as error:
        fix = "pip install --editable '.[recipes]', in the checkout"
        yield Finding("torchtune", f"its requirements are not installed: {error}", fix)
        return
    for requirement in requirements:
        name = requirement.name
        if requirement.marker and not requirement.marker.evaluate({"extra": "recipes"}):
            continue
        installed = version(name)
        if installed and requirement.specifier.contains(installed, prereleases=True):
            yield Finding(name, installed)
        else:
            text = f"{installed or 'not installed'}, but {requirement.specifier} is needed"
            yield Finding(name, text, f"pip install '{name}{requirement.specifier}'")


def check_devices() -> Iterator[Finding]:
    """Yield the number of accelerators visible to torch."""
    try:
        import torch

        build = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}"
        yield Finding("accelerators", f"{torch.accelerator.device_count()} seen by {build}")
    except Exception as error:
        fix = f"{_reinstall('torch')}, if nvidia-smi shows no fault"
        yield Finding("torch", f"cannot be used: {error}".partition("\n")[0], fix)


def check_torchtune() -> Iterator[Finding]:
    """Yield the path of ``tune``, and whether torchtune can be imported."""
    tune = shutil.which("tune", path=sysconfig.get_path("scripts"))
    yield Finding("tune", f"{tune}; PATH has {shutil.which('tune')}")
    try:
        # torchao warns about optional extensions that it does not load.
        with redirect_stderr(io.StringIO()):
            import_module("torchtune")
        yield Finding("import torchtune", "works")
    except Exception as error:
        # torchtune raises "torchao not installed" for any ImportError inside torchao.
        cause = error.__cause__ or error
        is_torchao = "torchao" in "".join(traceback.format_exception(error))
        fix = _reinstall("torchao" if is_torchao else "torchtune")
        yield Finding("import torchtune", f"fails: {type(cause).__name__}: {cause}", fix)


def _reinstall(name: str) -> str:
    """Return the command that reinstalls a distribution."""
    return f"pip install --force-reinstall --no-deps '{name}=={installed_version(name)}'"

"""Run the core's tests on each pair of torch and Python below: torch_versions.py [TORCH ...]

Each pair has a venv in .venv-versions, made once: 2 GB and a minute. torch's CUDA build is
installed without the libraries of NVIDIA; the emulated CUDA in their place has no device.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Each supported Python and torch at least once. `make test` runs the version of constraints.txt.
PAIRS = [("2.11.0", "3.11"), ("2.13.0", "3.12"), ("2.14.1", "3.10"), ("2.15.0", "3.13")]
NEEDED = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "accelerate", "transformers"]
EXTRAS = "recipes,report"  # tests of the core use torchao's optimizers and the estimate's settings
TESTS = [
    "tests/unit",
    "tests/distributed",
    "tests/test_architecture.py",
    "--ignore=tests/unit/torchtune",
    "--ignore=tests/unit/integrations",
    "--ignore=tests/distributed/test_trainer_ranks.py",
    "--ignore=tests/distributed/test_callback_ranks.py",
]
# FSDP2 needs torch 2.13; test_ddp.py does without.
WITHOUT_FSDP = [*TESTS, "--ignore-glob=tests/distributed/test_[!d]*"]
MARKS = "not (slow or nightly or gpu or cuda_stack or browser or readme or install)"

ROOT = Path(__file__).parents[2]
VENVS = ROOT / ".venv-versions"


def main() -> int:
    pairs = [pair for pair in PAIRS if len(sys.argv) == 1 or pair[0] in sys.argv[1:]]
    rows = []
    for torch, python in pairs:
        print(f"torch {torch}, Python {python} ...", flush=True)
        try:
            tests = WITHOUT_FSDP if torch < "2.13" else TESTS
            rows.append((torch, python, *outcome(venv_of(torch, python), tests)))
        except (subprocess.CalledProcessError, LookupError) as error:
            rows.append((torch, python, False, f"no environment: {error}"))
    for torch, python, is_well, said in rows:
        print(f"torch {torch:8} Python {python:6} {'ok    ' if is_well else 'FAILED'} {said}")
    return int(not all(is_well for *_, is_well, _ in rows))


def outcome(venv: Path, tests: list[str]) -> tuple[bool, str]:
    """Run tests in a venv. Return whether they pass, and the last line and path of the log."""
    options = ["-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "-m", MARKS]
    command = [venv / "bin/python", "-m", "pytest", *options, *tests]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "recipes")))
    environment = os.environ | {"PYTHONPATH": paths, "EMULATE_DEVICE_COUNT": "0"}
    log = venv.with_suffix(f"{venv.suffix}.log")
    with log.open("w") as file:
        how = {"stdout": file, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, cwd=ROOT, env=environment, **how)
    last = log.read_text().splitlines()[-1].strip("= ")
    return done.returncode == 0, f"{last}; see {log}"


def venv_of(torch: str, python: str) -> Path:
    """Return the venv of a pair; make it if it does not exist."""
    venv = VENVS / f"torch-{torch}-python-{python}"
    if (venv / "made").exists():
        return venv
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([interpreter(python), "-m", "venv", venv], check=True)
    own = venv / "bin/python"
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", f"torch=={torch}"], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (metadata,) = site.glob("torch-*.dist-info/METADATA")
    needed = metadata.read_text()
    metadata.write_text(re.sub(r"(?m)^Requires-Dist: (nvidia|cuda|triton).*\n", "", needed))
    subprocess.run([*pip, *NEEDED, f"{ROOT}[{EXTRAS}]"], check=True)
    metadata.write_text(needed)  # the emulated CUDA reads the original
    if "cuda: Optional[str] = None" not in (site / "torch/version.py").read_text():
        hook = "import adaptive_batch.emulate.process as process; process.install()"
        (site / "cuda_stack.pth").write_text(hook)
    (venv / "made").touch()
    return venv


def interpreter(python: str) -> str:
    """Return the path of a Python from pyenv or PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [*map(str, pyenv.glob(f"{python}.*/bin/python")), shutil.which(f"python{python}")]
    if found[0] is None:
        raise LookupError(f"python{python} was found neither in pyenv nor on PATH")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())

"""Run all proofs of the contract and write their results into one file, with the commit.

    python benchmarks/contract.py [--quick] [--only NAME ...] [--stack PYTHON] [--output DIR]
        [--against FILE]

Each proof is a command. It writes a record to a temporary folder, and the figures at the top of the
record are copied to `contract-COMMIT.json`. Results are saved after each proof. Proofs with a saved
result are skipped, so an interrupted run continues. ``--quick`` runs the short form of each proof
that has one. The proofs on PyTorch's CUDA build need ``make cuda-stack``. ``--against`` compares
results with those of an earlier commit: the exit status of each proof, and the counts that both
records have for the same command. It exits with 1 if they differ.
`parity_on_ranks` exits with 1 by design: torchtune's recipe cannot run two of its cases. The short
form of `kills` also exits with 1, because it has too few kills to hit every moment of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT, figures_of

# A count that depends on when a kill meets a run.
BY_CHANCE = {"never_hit"}
STACK = ROOT / ".venv-cuda-stack" / "bin" / "python"
# Arguments of the full form, then of the short form.
PROOFS = {
    "parity": ("parity.py", "", "--quick"),
    "parity_adapters": ("parity_adapters.py", "", "--quick"),
    "parity_adapters_on_ranks": ("parity_adapters.py", "--ranks", "--ranks --quick"),
    "parity_tasks": ("parity_tasks.py", "", "--quick"),
    "parity_on_ranks": ("parity_on_ranks.py", "", "--quick"),
    "faults": ("faults.py", "", "--quick"),
    "faults_adapters": ("faults.py", "--adapters", "--adapters --quick"),
    "faults_tasks": ("faults.py", "--tasks", "--tasks --quick"),
    "faults_on_ranks": ("faults_on_ranks.py", "", "--every 40 --lost 2 --ways 2 4"),
    "traceless": ("traceless.py", "", "--quick"),
    "traceless_adapters": ("traceless.py", "--adapters", "--adapters --quick"),
    "traceless_tasks": ("traceless.py", "--tasks", "--tasks --quick"),
    "kills": ("kills.py", "--kills 60", "--kills 2"),
    "resume_across_ranks": ("resume_across_ranks.py", "", "--ways growth tokens"),
    "search_in_trainers": ("search_in_trainers.py", "", "--quick"),
    "search": ("search.py", "", "--quick"),
    "published": ("published.py", "", ""),
    "cases": ("cuda_stack.py", "--only cases", "--only cases --cases 40"),
}
ON_STACK = {"cases"}


def run(name: str, quick: bool, stack: Path) -> dict[str, Any]:
    """Run one proof and return its command, exit status, seconds, last line and figures."""
    script, full, short = PROOFS[name]
    arguments = [f"benchmarks/{script}", *(short if quick else full).split()]
    python = stack if name in ON_STACK else Path(sys.executable)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [python, *arguments, "--output", folder],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        figures = [figures_of(json.loads(path.read_text())) for path in Path(folder).glob("*.json")]
    lines = [line for line in process.stdout.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("written to")]
    return {
        "command": " ".join(["python", *arguments]),
        "exit_status": process.returncode,
        "seconds": round(time.perf_counter() - start, 1),
        "last_line": lines[-1] if lines else "",
        "figures": figures,
    }


def differences(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Return one line for each proof whose exit status or counts differ from the recorded ones."""
    lines = []
    for name, result in now.items():
        recorded = then.get(name)
        if recorded is None or recorded["command"] != result["command"]:
            lines.append(f"{name}: not recorded by this command")
            continue
        if recorded["exit_status"] != result["exit_status"]:
            lines.append(f"{name}: exit {recorded['exit_status']} is now {result['exit_status']}")
        for old, new in zip(recorded["figures"], result["figures"], strict=False):
            counts = [key for key in old if isinstance(old[key], int) and key in new]
            lines += [
                f"{name}: {key} {old[key]} is now {new[key]}"
                for key in counts
                if old[key] != new[key] and key not in BY_CHANCE
            ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the short form of each proof")
    parser.add_argument("--only", nargs="+", choices=PROOFS, default=list(PROOFS), metavar="NAME")
    parser.add_argument("--stack", type=Path, default=STACK, help="python of PyTorch's CUDA build")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--against", type=Path, help="contract-COMMIT.json of an earlier commit")
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    path = arguments.output / f"contract-{commit}.json"
    results = json.loads(path.read_text()) if path.exists() else {"commit": commit, "proofs": {}}
    for name in arguments.only:
        if name not in results["proofs"]:
            results["proofs"][name] = run(name, arguments.quick, arguments.stack)
            path.write_text(json.dumps(results, indent=1) + "\n")
        result = results["proofs"][name]
        print(f"{name}: exit {result['exit_status']}, {result['seconds']} s: {result['last_line']}")
    if arguments.against:
        recorded = json.loads(arguments.against.read_text())["proofs"]
        done = {name: results["proofs"][name] for name in arguments.only}
        differing = differences(done, recorded)
        print(*differing or ["every proof as recorded"], sep="\n")
        sys.exit(bool(differing))


if __name__ == "__main__":
    main()

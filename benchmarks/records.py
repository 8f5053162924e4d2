"""What every record of a measurement says: when, by which command, on which machine, with which
versions.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "torch",
    "torchao",
    "torchdata",
    "torchtune",
    "numpy",
    "adaptive-batch",
    "bitsandbytes",
    "transformers",
    "trl",
    "accelerate",
    "lightning",
    "datasets",
)


def write(name: str, folder: Path, /, **measured: Any) -> Path:
    """Write ``NAME-YYYY-MM-DD.json`` and say where."""
    today = date.today().isoformat()
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    record = {
        "date": today,
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "machine": {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "threads": torch.get_num_threads(),
            "device": device,
        },
        "versions": versions,
        **measured,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{today}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwritten to {path}")
    return path

"""A memory plan read back from its ``plan.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from adaptive_batch.memory import Line, MemoryCurve

from .fake_step import Resident
from .memory_plan import Change, Kinds, LengthEstimate, MemoryEstimate, Target


def read_plan(path: Path) -> MemoryEstimate | None:
    """The plan in a file; None where there is none that can be read.

    It says what the plan said that was saved, but not in which operation of the model a peak is reached.
    """
    try:
        return plan_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def plan_of(saved: Mapping[str, Any]) -> MemoryEstimate:
    """The plan that :meth:`MemoryEstimate.as_json` gave.

    Raises:
        ValueError, KeyError, TypeError: it did not give this.
    """
    changes = [
        Change(
            overrides=tuple(map(str, change["overrides"])),
            cost=str(change["cost"]),
            bounds=tuple(None if rows is None else int(rows) for rows in change["bounds"]),
            refused=str(change["refused"]),
        )
        for change in saved["changes"]
    ]
    plan = MemoryEstimate(
        targets=tuple(
            Target(
                name=str(device["name"]),
                total_bytes=int(device["total_bytes"]),
                budget_bytes=int(device["budget_bytes"]),
                taken=tuple((str(name), int(size)) for name, size in device["taken"].items()),
                source=str(device["source"]),
            )
            for device in saved["devices"]
        ),
        lengths=tuple(_length_of(length) for length in saved["lengths"]),
        maximum=int(saved["maximum"]),
        world_size=int(saved["world_size"]),
        left_out=tuple(map(str, saved["left_out"])),
        changes=tuple(change for change in changes if not change.refused),
        refused=tuple(change for change in changes if change.refused),
        seconds=float(saved["seconds"]),
    )
    if not plan.targets or not plan.lengths or not all(length.kinds for length in plan.lengths):
        raise ValueError("a plan has devices, lengths, and lines for each length")
    return plan


def _length_of(saved: Mapping[str, Any]) -> LengthEstimate:
    kinds = tuple(
        Kinds(
            line=Line(Fraction(line["fixed_bytes"]), Fraction(line["bytes_per_row"]), operation),
            activations=(float(line["activations"]["fixed_bytes"]), float(line["activations"]["bytes_per_row"])),
            gradients=int(line["gradients"]),
        )
        for operation, line in enumerate(saved["lines"])
    )
    checked, of_step = saved["checked"], saved["optimizer_peak_bytes"]
    return LengthEstimate(
        sequence_length=int(saved["sequence_length"]),
        resident=Resident(**{name: int(size) for name, size in saved["resident"].items()}),
        curve=MemoryCurve(tuple(one.line for one in kinds)),
        kinds=kinds,
        one_row_bytes=int(saved["one_row_bytes"]),
        optimizer_peak_bytes=None if of_step is None else int(of_step),
        checked=None if checked is None else (int(checked["rows"]), int(checked["peak_bytes"]), int(checked["said"])),
    )

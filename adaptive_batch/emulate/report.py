"""The report at the end of an emulated program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_LINES = 8
GIB = 2**30


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a report: the memory of each process, and its inexact parts."""
    total, context = report["total_bytes"], report["context_bytes"]
    yield ""
    yield (
        f"adaptive-batch emulate: {report['device']}, {_size(total)} with {_size(context)} for the"
        f" CUDA context; {report['seconds']} s"
    )
    yield (
        "Values and times are not real: do not use losses, metrics, speeds or checkpoints of this"
        " run. `auto` of adaptive_batch takes the largest size that fits."
    )
    processes = report["processes"]
    if not processes:
        yield "No process used CUDA."
    else:
        yield from _table(processes, total - context)
        most = max(processes, key=lambda one: one["living"].get("bytes", 0))
        yield from _living(most["living"])
        for process in processes:
            if process["out_of_memory"]:
                yield from _out_of_memory(process)
        yield from _made_up(processes)
        functions = sorted({name for one in processes for name in one["not_counted"]})
        if functions:
            yield (
                "Not counted, since their sizes are not published: workspaces of"
                f" {', '.join(functions)}."
            )
    yield from _files(report)
    if report["ended_by_time_limit"]:
        yield "The time limit ended the program."


def _table(processes: list[dict[str, Any]], usable: int) -> Iterator[str]:
    rows = [("process", "device", "steps", "peak allocated", "peak reserved", "free", "retries")]
    for process in processes:
        rank = f" (rank {process['rank']})" if process["rank"] else ""
        name = process["program"][0].rpartition("/")[2] or "python"
        for device in process["devices"]:
            rows.append(
                (
                    f"{name}{rank}",
                    str(device["index"]),
                    str(process["steps"]),
                    _size(device["allocated"]),
                    _size(device["reserved"]),
                    _size(max(0, usable - device["reserved"])),
                    str(device["retries"]),
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells])


def _living(living: dict[str, Any]) -> Iterator[str]:
    if not living:
        return
    yield f"Live at the peak of {_size(living['bytes'])} on device {living['device']}:"
    lines = living["lines"]
    for line, num_bytes in lines[:MAX_LINES]:
        yield f"  {_size(num_bytes):>11}  {line}"
    rest = sum(num_bytes for _, num_bytes in lines[MAX_LINES:])
    if rest:
        yield f"  {_size(rest):>11}  {len(lines) - MAX_LINES} other lines"


def _out_of_memory(process: dict[str, Any]) -> Iterator[str]:
    last = process["out_of_memory"]
    times = process["times_out_of_memory"]
    yield (
        f"Out of memory {'once' if times == 1 else f'{times} times, the last'} at {last['line']}:"
        f" {_size(last['asked'])} requested, {_size(last['free'])} free."
    )
    yield f"  {_suggestion(process)}"


def _suggestion(process: dict[str, Any]) -> str:
    last, lines = process["out_of_memory"], process["living"].get("lines", [])
    unused = last["reserved"] - last["allocated"]
    if unused >= last["asked"]:
        return (
            f"{_size(unused)} are reserved but unused: set"
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )
    of_optimizer = sum(size for line, size in lines if line.startswith("optimizer"))
    if of_optimizer > last["allocated"] / 3:
        return (
            f"The optimizer holds {_size(of_optimizer)}: train adapters (LoRA), use an 8-bit"
            " optimizer, or shard the model over more devices (FSDP)."
        )
    return (
        "Lower the batch size, or let adaptive_batch find the largest one (AdaptiveTrainer,"
        " find_max_batch_size); activation checkpointing needs less memory for the same batch."
    )


def _made_up(processes: list[dict[str, Any]]) -> Iterator[str]:
    for kind, sentence in (
        ("shape", "Shapes that depend on values that were not computed; their peak is a guess"),
        ("value", "Values that the program read although they were not computed"),
    ):
        places: dict[str, set[str]] = {}
        for process in processes:
            for found, origin, line, _ in process["made_up"]:
                if found == kind:
                    places.setdefault(line, set()).add(origin)
        if places:
            shown = [f"{line} ({', '.join(sorted(of))})" for line, of in places.items()]
            more = f" and {len(shown) - MAX_LINES} more" if len(shown) > MAX_LINES else ""
            yield f"{sentence}: {'; '.join(shown[:MAX_LINES])}{more}."


def _files(report: dict[str, Any]) -> Iterator[str]:
    files = report["files"]
    if files:
        place = report["folder"] or "a scratch folder that is deleted (keep it with --output)"
        largest = sorted(files, key=lambda file: -file[1])[:MAX_LINES]
        shown = ", ".join(f"{name} {_size(size)}" for name, size in largest)
        more = f" and {len(files) - MAX_LINES} more" if len(files) > MAX_LINES else ""
        yield f"Files written to {place}: {shown}{more}."


def _size(num_bytes: int) -> str:
    if num_bytes >= GIB / 10:
        return f"{num_bytes / GIB:.3f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"

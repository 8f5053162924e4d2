"""Print what a renamed private name of torch stops, as JSON: {name: {part: error or null}}.

Each name is hidden from adaptive_batch alone, in a process of its own: torch still finds it.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from support.paths import ROOT
from torch import nn
from torch.nn import functional

SUBCLASSED = "torch.utils._python_dispatch.TorchDispatchMode"


def asked_names() -> dict[str, None]:
    """Return the dotted private names that the package asks modules for."""
    from adaptive_batch._torch import NAMES

    names = dict.fromkeys(NAMES.values())
    for path in sorted((ROOT / "adaptive_batch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "private":
                if not isinstance(node.args[0], ast.Constant):
                    continue
                owner, *attributes = (
                    argument.value for argument in node.args if isinstance(argument, ast.Constant)
                )
                names.update(dict.fromkeys(f"{owner}.{name}" for name in attributes))
    return names


def hide(dotted: str) -> None:
    """Hide an attribute of a module from adaptive_batch."""
    path, _, hidden = dotted.rpartition(".")
    module = importlib.import_module(path)

    kind = type(module)

    def is_hidden(name: str) -> bool:
        caller = sys._getframe(2).f_globals["__name__"]
        return name == hidden and caller.startswith("adaptive_batch")

    class Renamed(kind):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            if is_hidden(name):
                raise AttributeError(name)
            return super().__getattribute__(name)

        def __getattr__(self, name: str) -> Any:
            # Modules of settings have it.
            if is_hidden(name) or not hasattr(kind, "__getattr__"):
                raise AttributeError(name)
            return kind.__getattr__(self, name)

    ModuleType.__setattr__(module, "__class__", Renamed)


def modules() -> Iterator[ModuleType]:
    """Import the whole package, without the integrations, and the recipes."""
    import adaptive_batch

    for found in pkgutil.walk_packages(adaptive_batch.__path__, "adaptive_batch."):
        if not found.name.startswith(("adaptive_batch.integrations.", "adaptive_batch.__main__")):
            yield importlib.import_module(found.name)
    for path in sorted((ROOT / "recipes").glob("*.py")):
        yield importlib.import_module(path.stem)


def bound_names() -> dict[str, list[str]]:
    """Return the private names that the modules have bound so far."""
    bound = {
        module.__name__: sorted(set(vars(module.private)) - {"_part"})
        for module in modules()
        if hasattr(module, "private")
    }
    return {name: names for name, names in bound.items() if names}


def take_step(model: nn.Module, **options: Any) -> None:
    from adaptive_batch import AdaptiveStep

    def forward_backward(part: Any) -> None:
        (model(part.batch["x"]).square().mean() * part.share).backward()

    AdaptiveStep(model, forward_backward, **options)({"x": torch.randn(6, 4)})


def batches() -> None:
    from adaptive_batch import AdaptiveBatches

    assert sum(map(len, AdaptiveBatches(range(12), 4))) == 12


def step() -> None:
    take_step(nn.Linear(4, 4), micro_batch_size=3)


def step_with_statistics() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("num_steps", torch.zeros(()))
    take_step(model)


def search() -> None:
    from adaptive_batch import find_max_batch_size

    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    find_max_batch_size(
        model,
        optimizer,
        lambda batch: model(batch).square().mean().backward(),
        lambda rows: torch.randn(rows, 4),
        device_memory="1MiB",
        maximum=4,
    )


def estimate() -> None:
    from adaptive_batch import estimate_memory

    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    estimate_memory(
        model,
        torch.randn(2, 4),
        optimizer,
        "1GiB",
        mean_loss=lambda batch: model(batch).square().mean(),
        maximum=4,
    )


def checkpoint() -> None:
    from adaptive_batch.checkpoint import CheckpointManager

    with tempfile.TemporaryDirectory() as folder:
        CheckpointManager(Path(folder)).save(1, {"model": nn.Linear(4, 4).state_dict()}, {})


def noise_scale() -> None:
    from adaptive_batch.schedules import squared_norm

    squared_norm([torch.ones(2)])


def packed_rows() -> None:
    from adaptive_batch.training import isolated_rows

    with isolated_rows([2, 3]):
        rows = torch.randn(1, 1, 5, 8)
        functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)


PARTS = {
    part.__name__: part
    for part in (
        batches,
        step,
        step_with_statistics,
        search,
        estimate,
        checkpoint,
        noise_scale,
        packed_rows,
    )
}


def recipes() -> None:
    """Import all that `tune run` does."""
    assert list(modules())


def outcomes(parts: dict[str, Callable[[], None]]) -> dict[str, str | None]:
    """Run parts, and return the errors that they raise."""
    from adaptive_batch.errors import TorchVersionError

    errors: dict[str, str | None] = {}
    for name, run in parts.items():
        errors[name] = None
        try:
            run()
        except TorchVersionError as error:
            errors[name] = str(error)
        except Exception as error:
            errors[name] = f"not a TorchVersionError: {error!r}"
    return errors


def in_child(name: str, parts: dict[str, Callable[[], None]]) -> dict[str, str | None]:
    """Return the outcomes of parts in a fork in which a name is hidden."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        hide(name)
        os.write(writer, json.dumps(outcomes(parts)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    assert text, f"{name}: the child ended with {status}"
    answers: dict[str, str | None] = json.loads(text)
    return answers


def main() -> None:
    torch.set_num_threads(1)
    names = asked_names()
    # Its subclasses are bound to it when they are imported, all else at its first use.
    stopped = {SUBCLASSED: in_child(SUBCLASSED, {**PARTS, "recipes": recipes})}
    bound = bound_names()
    for name in names:
        importlib.import_module(name.rpartition(".")[0])
        if name != SUBCLASSED:
            stopped[name] = in_child(name, PARTS)
    print(json.dumps({"bound": bound, "stopped": stopped}))


if __name__ == "__main__":
    main()

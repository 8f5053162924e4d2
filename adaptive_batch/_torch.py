"""Private names of torch, bound at their first use.

If a version of torch lacks a name, only the parts that use it fail.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from importlib import import_module
from typing import Any

import torch

from adaptive_batch.errors import TorchVersionError

# The range of versions that `make test-versions` tests.
OLDEST = "2.11.0"
NEWEST = "2.15.0"

NAMES = {
    "DispatchKey": "torch._C.DispatchKey",
    "DispatchKeySet": "torch._C.DispatchKeySet",
    "FakeTensor": "torch._subclasses.fake_tensor.FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor.FakeTensorMode",
    "OpOverload": "torch._ops.OpOverload",
    "allocator_snapshot": "torch.cuda.memory._snapshot",
    "compilation_callbacks": "torch._dynamo.callback.callback_handler",
    "current_graph_task_id": "torch._C._current_graph_task_id",
    "disable_current_modes": "torch.utils._python_dispatch._disable_current_modes",
    "no_torch_functions": "torch._C.DisableTorchFunction",
    "set_allocator_settings": "torch._C._accelerator_setAllocatorSettings",
    "storage_use_count": "torch._C._storage_Use_Count",
    "tree_leaves": "torch.utils._pytree.tree_leaves",
    "tree_map_only": "torch.utils._pytree.tree_map_only",
}


class PrivateNames:
    """Private names of torch for one part of this package.

    Attributes are names of :data:`NAMES`, bound at their first use. A call checks the names of
    another module or object.

    Args:
        part: part that needs the names, for errors.

    Raises:
        TorchVersionError: torch lacks the name.
    """

    def __init__(self, part: str) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"{name} is not in NAMES")
        module, _, attribute = NAMES[name].rpartition(".")
        owner = self(module, attribute)
        value = getattr(owner, attribute)
        # From now on, the attribute exists, so that this method is not called for it.
        setattr(self, name, value)
        return value

    def __call__(self, owner: Any, *names: str) -> Any:
        """Return `owner`, an object or the module of this name, after checking its `names`."""
        path = owner if isinstance(owner, str) else type(owner).__name__
        if isinstance(owner, str):
            try:
                owner = import_module(owner)
            except ModuleNotFoundError:
                raise _unsupported(f"has no {path}, so {self._part} cannot be used") from None
        for name in names:
            if not hasattr(owner, name):
                raise _unsupported(f"has no {path}.{name}, so {self._part} cannot be used")
        return owner


def _unsupported(problem: str) -> TorchVersionError:
    return TorchVersionError(
        f"torch {torch.__version__} {problem}; adaptive_batch was tested with torch {OLDEST} to"
        f" {NEWEST}: pip install 'torch>={OLDEST},<={NEWEST}'"
    )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


if torch.__version__ < OLDEST:
    raise _unsupported(
        "is too old: with 2.9 two ranks trained to NaN, and before it FSDPParamGroup has no"
        " _all_gather_comm"
    )
# Log once per run, not in each rank and DataLoader worker.
_is_first_process = os.environ.get("RANK", "0") == "0" and not multiprocessing.parent_process()
if _minor(torch.__version__) > _minor(NEWEST) and _is_first_process:
    logging.getLogger(__name__).warning(
        "torch %s is newer than the newest tested version, %s: memory estimates may be off, and"
        " parts that use renamed private names of torch raise TorchVersionError",
        torch.__version__,
        NEWEST,
    )

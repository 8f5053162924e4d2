"""What is used of torch without being public. It is asked for here alone, so that a torch that
lacks some of it is refused in one line.
"""

import re
from importlib import import_module
from typing import Any

import torch

from adaptive_batch.errors import TorchVersionError

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "current_autograd_node",
    "current_graph_task_id",
    "disable_current_modes",
    "disable_dynamo",
    "dispatch_modes",
    "foreach_norm",
    "is_traceable_wrapper_subclass",
    "num_torch_function_modes",
    "pop_torch_function_mode",
    "push_torch_function_mode",
    "storage_use_count",
    "tree_leaves",
    "tree_map_only",
]

# The versions that the tests were run on, by `make test-versions`.
OLDEST = "2.11.0"
NEWEST = "2.15.0"


def unsupported(why: str) -> TorchVersionError:
    """Return the error that says in one line why this torch will not do, and which do."""
    return TorchVersionError(
        f"torch {torch.__version__} {why}; adaptive_batch was run with {OLDEST} to {NEWEST}: "
        f"pip install 'torch>={OLDEST},<={NEWEST}'"
    )


def private(owner: Any, *names: str) -> Any:
    """Return `owner`, an object or the module of that name, which has all of `names`."""
    if isinstance(owner, str):
        owner = import_module(owner)
    for name in names:
        if not hasattr(owner, name):
            raise unsupported(f"has no {getattr(owner, '__name__', type(owner).__name__)}.{name}")
    return owner


if torch.__version__ < OLDEST:
    raise unsupported(
        "is too old: with 2.9 two ranks trained to NaN, and before it FSDPParamGroup has no"
        " _all_gather_comm"
    )

try:
    from torch import _foreach_norm as foreach_norm
    from torch._C import _current_autograd_node as current_autograd_node
    from torch._C import _current_graph_task_id as current_graph_task_id
    from torch._C import _len_torch_function_stack as num_torch_function_modes
    from torch._C import _pop_torch_function_stack as pop_torch_function_mode
    from torch._C import _push_on_torch_function_stack as push_torch_function_mode
    from torch._C import _storage_Use_Count as storage_use_count
    from torch._compile import _disable_dynamo as disable_dynamo
    from torch._ops import HigherOrderOperator, OpOverload
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
    from torch.utils._pytree import tree_leaves, tree_map_only
except ImportError as error:
    raise unsupported(
        re.sub(r"cannot import name '(\w+)' from '(.*?)'.*", r"has no \2.\1", str(error))
    ) from None

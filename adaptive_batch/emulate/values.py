"""Values of small tensors on a device whose kernels compute nothing.

The emulated device's memory is memory of this process. Each operator of PyTorch with a CUDA kernel
is registered again: the CUDA kernel runs and allocates as ever, then, if the tensors are small, the
operator's CPU kernel computes the values. Values of large tensors are not kept. A small tensor that
depends on them gets a default that does no harm: 1, indices that spread evenly, flags that raise no
alarm. Where the program reads such a value, or a shape depends on it, :data:`made_up` counts the
line.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from .build import STUB
from .lines import running_line

# The largest storage whose values are kept: elements of floating point, and bytes of integers and
# flags, on which control flow depends.
MAX_FLOATS = int(os.environ.get("EMULATE_MAX_FLOATS", 2**14))
MAX_INTEGER_BYTES = int(os.environ.get("EMULATE_MAX_INTEGER_BYTES", 2**23))

# What the report tells: (kind, operator that could not be computed, line that depends on it).
made_up: Counter[tuple[str, str, str]] = Counter()

LARGE = "a large tensor"
# Operators that return positions in their first argument.
_POSITIONS = {
    "topk",
    "sort",
    "argsort",
    "argmax",
    "argmin",
    "multinomial",
    "max",
    "min",
    "kthvalue",
}
_OVERWRITING = {"fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "random_"}
# Flags that are false unless something is wrong.
_ALARMS = {"any", "isnan", "isinf", "isposinf", "isneginf", "signbit", "eq"}
_COMPARISONS = {"lt", "le", "gt", "ge"}
# pow of a number calls the last with a CUDA tensor that is marked as a number, which PyTorch cannot
# pass to Python.
_LEFT_ALONE = {"set_", "record_stream", "pow.Tensor_Tensor_out"}

_origins: dict[int, str] = {}  # address of a storage with defaults -> the operator not computed
_lines_with_any = set[str]()
_libraries: list[Any] = []
_C: Any = torch._C


def install() -> None:
    """Register the operators. CUDA is not initialized."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    special: dict[str, Callable[..., Any]] = {
        "_local_scalar_dense": _read,
        "equal": _read,
        "empty.memory_format": _empty,
        "empty_strided": _empty,
        "copy_": _Operator,
        "nonzero": _nonzero,
        "_unique": _unique,
        "_unique2": _unique,
        "unique_dim": _unique,
        "unique_consecutive": _unique,
        "unique_dim_consecutive": _unique,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each is registered a second time
        for full_name in _C._dispatch_get_all_op_names():
            namespace, _, name = full_name.partition("::")
            base, _, overload = name.partition(".")
            if namespace != "aten" or {base, name} & _LEFT_ALONE:
                continue
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            aliases = [result.alias_info for result in operator._schema.returns]
            is_view = any(alias is not None and not alias.is_write for alias in aliases)
            if name in special or (not is_view and operator.has_kernel_for_dispatch_key("CUDA")):
                make = special.get(name, _Operator)
                kernel = make(operator, torch.library.get_kernel(operator, "CUDA").call_boxed)
                library.impl(operator, kernel, "CUDA", with_keyset=True, allow_override=True)
    # Inductor's kernels are not operators; this allocates what they write.
    guards = _C._dynamo.guards
    guards._empty_strided_cuda = _allocating(guards._empty_strided_cuda, "a compiled kernel")


# ---- memory of the device on the host

_Memory = ctypes.c_char * 2**46  # no tensor is larger


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor that shares the memory of a CUDA tensor."""
    if not tensor.is_cuda:
        return tensor
    size, stride = tensor.size(), tensor.stride()
    if not tensor.numel():
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device="cpu")
    span = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    memory = _Memory.from_address(tensor.data_ptr())
    view = torch.frombuffer(memory, dtype=tensor.dtype, count=span).as_strided(size, stride)
    return view.conj() if tensor.is_conj() else view


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the bytes of a tensor's storage.

    Python's own object of a storage counts as a reference to it, for as long as the storage lives:
    backward would no longer add to gradients in place, and memory would differ.
    """
    words = _words_of_storage(tensor)
    address, size = _places_in_storage()
    return words[address], words[size]


def _words_of_storage(tensor: torch.Tensor) -> Any:
    return (ctypes.c_int64 * 16).from_address(_C._storage_address(tensor))


@cache
def _places_in_storage() -> tuple[int, int]:
    """Return which words of a storage hold its address and its size."""
    probe = torch.empty(123_457, dtype=torch.uint8, device="cpu")
    words = list(_words_of_storage(probe))
    return words.index(probe.data_ptr()), words.index(len(probe))


def _is_exact(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether the values of this tensor's storage are kept."""
    if tensor.layout is not torch.strided:
        return False
    limit = MAX_INTEGER_BYTES if _is_exact(tensor) else MAX_FLOATS * tensor.element_size()
    return (_storage(tensor)[1] if tensor.is_cuda else tensor.nbytes) <= limit


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


# ---- values that were not computed


def _origin(tensors: Iterable[torch.Tensor]) -> str | None:
    """Return the operator that was not computed and on which one of the tensors depends."""
    for tensor in tensors:
        if tensor.is_cuda:
            origin = _origins.get(_storage(tensor)[0]) if has_values(tensor) else LARGE
            if origin is not None:
                return origin
    return None


def _set_origin(tensor: torch.Tensor, origin: str | None) -> None:
    address, _ = _storage(tensor)
    if origin is not None and address:
        _origins[address] = origin
    else:
        _origins.pop(address, None)


def _note(kind: str, origin: str | None) -> None:
    if origin is not None:
        made_up[kind, origin, running_line()] += 1


def _fill_default(tensor: torch.Tensor, name: str, given: Mapping[str, Any]) -> None:
    """Write what does no harm into a small tensor that an operator could not compute.

    Args:
        name: the operator's.
        given: its arguments.
    """
    if not has_values(tensor) or not tensor.numel():
        return
    host, operands, dim = on_host(tensor), list(given.values()), given.get("dim", -1)
    if tensor.dtype == torch.bool:
        is_same = name in ("eq", "ne") and operands[0] is operands[1]
        host.fill_((name not in _ALARMS) != is_same)
    elif not _is_exact(tensor):
        host.fill_(1)
    elif name in _POSITIONS and operands[0].dim() and dim is not None:
        rows = host if host.dim() < operands[0].dim() else host.movedim(dim, -1)
        numbers = torch.arange(tensor.numel(), device="cpu") % operands[0].size(dim)
        rows.copy_(numbers.view(rows.shape))
    else:
        host.zero_()


def _alternate(flag: torch.Tensor) -> None:
    """Make a flag false at every second call of a line: both branches run, and a loop until no
    element is out of bounds (`trunc_normal_`) ends.
    """
    if flag.numel() == 1 and on_host(flag).item():
        line = running_line()
        on_host(flag).fill_(line not in _lines_with_any)
        _lines_with_any.symmetric_difference_update([line])


# ---- operators


class _Operator:
    """The kernel of one operator: CUDA's, then the values of its small results."""

    def __init__(self, operator: Any, cuda_kernel: Callable[..., Any]) -> None:
        self.operator, self.cuda_kernel = operator, cuda_kernel
        self.name: str = operator._schema.name.removeprefix("aten::")
        arguments = operator._schema.arguments
        self.defaults = {argument.name: argument.default_value for argument in arguments}
        self.tensors = [one.name for one in arguments if "Tensor" in str(one.type)]
        self.written = [
            one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write
        ]

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**self.defaults, **dict(zip(self.defaults, args, strict=False)), **kwargs}
        tensors = list(_tensors(list(given.values())))
        for name in self.tensors:
            if isinstance(given[name], int | float | complex):
                # As a number, it does not change the type of the result.
                dtype = torch.result_type(tensors[0], given[name])
                given[name] = torch.tensor(given[name], dtype=dtype, device="cpu")
        origin = _origin(tensors[self._overwrites(tensors) :])
        operands = None
        if all(map(has_values, tensors)) and not (origin and self.name in _POSITIONS):
            # CUDA's kernel may compute what is written, by calling other operators.
            operands = {
                name: _to_host(value, copies=name in self.written) for name, value in given.items()
            }
            if "generator" in given:
                operands["generator"] = _host_generator(given["generator"])
        result = self.cuda_kernel(keyset, **given)
        written = [given[name] for name in self.written]
        outputs = list(_tensors(written or result))
        if operands is None or not self._compute(operands, outputs, origin):
            if not (written and ("foreach" in self.name or "fused" in self.name)):
                for output in outputs:
                    _fill_default(output, self.name.rstrip("_"), given)
            if origin in (None, LARGE) and self.name != "copy_":
                origin = self.name
        for output in filter(has_values, outputs):
            if output.is_cuda:
                _set_origin(output, origin)
            elif written:
                _note("value", origin)
        return result

    def _overwrites(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether nothing is left of the first tensor's storage."""
        if self.name not in _OVERWRITING or not has_values(tensors[0]):
            return False
        return tensors[0].nbytes == _storage(tensors[0])[1]

    def _compute(
        self, operands: dict[str, Any], outputs: list[torch.Tensor], origin: str | None
    ) -> bool:
        """Compute the outputs on the host, and return whether that was possible."""
        if not all(map(has_values, outputs)):
            return False
        try:
            result = self.operator(**operands)
            values = _tensors([operands[name] for name in self.written] or result)
            for output, value in zip(outputs, values, strict=False):
                if output.shape == value.shape:
                    on_host(output).copy_(value)
                if origin is not None and output.is_floating_point():
                    on_host(output).nan_to_num_(1, 1, 1)
        except Exception:  # a CPU kernel may lack a dtype, or refuse values that nobody computed
            return False
        if self.name == "any" and origin in _COMPARISONS:
            _alternate(outputs[0])
        return True


def _to_host(value: Any, copies: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return on_host(value).clone() if copies else on_host(value)
    if isinstance(value, list | tuple):
        return [_to_host(one, copies) for one in value]
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _host_generator(generator: torch.Generator | None) -> torch.Generator:
    """Return a CPU generator whose seed follows from the state of the CUDA generator."""
    if generator is None:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
    offset = 0
    with suppress(RuntimeError):  # a stream captures
        offset = generator.get_offset()
    return torch.Generator().manual_seed((generator.initial_seed() * 1000003 + offset) % 2**63)


def _read(operator: Any, cuda_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Make the kernel of an operator that returns no tensor: `item` and `equal`."""

    def read(keyset: Any, *tensors: torch.Tensor) -> Any:
        cuda_kernel(keyset, *tensors)
        _note("value", _origin(tensors))
        if all(map(has_values, tensors)):
            return operator(*map(on_host, tensors))
        return operator(*(torch.ones((), dtype=one.dtype, device="cpu") for one in tensors))

    return read


def _nonzero(operator: Any, cuda_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """CUDA's kernel counts on the device: it gets the count from the host and allocates by it."""
    compute = _Operator(operator, cuda_kernel)
    answer = ctypes.CDLL(STUB).cudastub_answer

    def nonzero(keyset: Any, tensor: torch.Tensor) -> torch.Tensor:
        _note("shape", _origin([tensor]))
        count = on_host(tensor).count_nonzero() if has_values(tensor) else tensor.numel()
        answer(ctypes.c_longlong(int(count)))
        result: torch.Tensor = compute(keyset, tensor)
        answer(ctypes.c_longlong(-1))
        return result

    return nonzero


def _unique(operator: Any, cuda_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The results' sizes are read within CUDA's library: all is computed on the host. The
    temporaries of CUDA's kernel are missing from the peak.
    """

    def unique(keyset: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        origin = _origin([tensor])
        _note("shape", origin)
        if has_values(tensor):
            host = on_host(tensor)
        else:  # as many as there can be
            host = torch.arange(tensor.numel(), device="cpu").view(tensor.shape)
        values, *others = operator(host, *args, **kwargs)
        results = [one.to(tensor.device) for one in (values.to(tensor.dtype), *others)]
        for result in results:
            _set_origin(result, origin)
        return tuple(results)

    return unique


def _empty(operator: Any, cuda_kernel: Callable[..., Any]) -> Callable[..., Any]:
    return _allocating(cuda_kernel, None)


def _allocating(allocate: Callable[..., Any], origin: str | None) -> Callable[..., Any]:
    """Return a function that also fills what it allocates with defaults."""

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = allocate(*args, **kwargs)
        _fill_default(result, "empty", {})
        _set_origin(result, origin)
        return result

    return empty

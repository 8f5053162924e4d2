"""Values of small tensors on a device whose kernels compute nothing.

The memory of the emulated device is memory of this process. Each operator of PyTorch with a CUDA
kernel is registered again: the CUDA kernel runs and allocates as usual; then, for small tensors,
the operator's CPU kernel computes the values at the same addresses. Operators whose results have
sizes that depend on values run on the CPU only, and their temporaries are missing from the peak.
Values of large tensors are not kept. A small tensor that depends on them gets harmless defaults: 1,
evenly spread indices, flags without an alarm. If the program reads such a value, or a shape depends
on it, :data:`made_up` counts the line.
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import torch

# The largest storage whose values are kept: elements of floating point, and bytes of integers and
# flags, on which control flow depends.
MAX_FLOATS = int(os.environ.get("EMULATE_MAX_FLOATS", 2**14))
MAX_INTEGER_BYTES = 2**23

# Counts for the report by (kind, operator that was not computed, line that depends on it).
made_up: Counter[tuple[str, str, str]] = Counter()

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
# Operators that return different values, as many as there are.
_UNIQUE = {
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
}
# Operators that only allocate or create views, or that have their own function below.
_LEFT_ALONE = {
    "set_",
    "record_stream",
    "pow.Tensor_Tensor_out",  # see _pow_of_number
}

_origins: dict[int, str] = {}  # address of a storage with defaults -> the operator not computed
_lines_with_any = set[str]()
_libraries: list[Any] = []
_C: Any = torch._C
_own_folder = str(Path(__file__).parent)
_torch_folder = str(Path(torch.__file__).parent)
_python_folder = sysconfig.get_path("stdlib")


def install() -> None:
    """Register the operators. CUDA is not initialized."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    # Functions that replace the usual kernel of an operator, by its name with or without overload;
    # None keeps the usual kernel.
    special: dict[str, Callable[..., Any] | None] = {
        "nonzero": partial(_on_host_only, returns_values=False),
        "nonzero.out": None,
        **dict.fromkeys(_UNIQUE, partial(_on_host_only, returns_values=True)),
        **dict.fromkeys(("empty", "empty_strided"), _empty),
        "copy_": _copy,
        "_local_scalar_dense": _read_number,
        "pow.Scalar": _pow_of_number,
        "resize_": _resize,
    }
    has_kernel = _C._dispatch_has_kernel_for_dispatch_key
    with warnings.catch_warnings():
        # PyTorch warns that each operator is registered a second time.
        warnings.simplefilter("ignore")
        for name in _C._dispatch_get_all_op_names():
            aten_name = name.removeprefix("aten::")
            # A name without aten:: belongs to another library.
            if aten_name == name:
                continue
            for key in ("SparseCUDA", "SparseCsrCUDA"):
                if has_kernel(name, key):
                    library.impl(aten_name, _refuse_sparse, key, allow_override=True)
            base, _, overload = aten_name.partition(".")
            # Most other operators of nested tensors call operators of CUDA.
            key = "NestedTensorCUDA" if base == "to_padded_tensor" else "CUDA"
            is_left_alone = {base, aten_name} & _LEFT_ALONE
            if is_left_alone or not (aten_name in special or has_kernel(name, key)):
                continue
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            aliases = [result.alias_info for result in operator._schema.returns]
            # A result that shares memory which the operator does not write is a view.
            if any(alias is not None and not alias.is_write for alias in aliases):
                continue
            kernel: Callable[..., Any] = _Operator(operator, torch.library.get_kernel(name, key))
            function = special.get(aten_name, special.get(base))
            if function is not None:
                kernel = partial(function, kernel)
            library.impl(aten_name, kernel, key, with_keyset=True, allow_override=True)
    _fill_what_compiled_code_allocates()


def program_line() -> str:
    """Return the line of the program that is running, and the library's line that it called."""
    stack = traceback.walk_stack(sys._getframe(1))
    return describe((frame.f_code.co_filename, number) for frame, number in stack)


def describe(frames: Iterable[tuple[str, int]]) -> str:
    """Return the innermost line that is not PyTorch's or Python's, and the program's own line.

    Args:
        frames: files and line numbers, innermost frame first.
    """
    lines = [
        f"{os.path.basename(file)}:{number}"
        for file, number in until_program(frames)
        if not _is_internal(file)
    ]
    # Backward runs in PyTorch's own threads, whose stacks have no line of the program.
    if not lines:
        return "backward"
    return lines[0] if len(lines) == 1 else f"{lines[0]}, from {lines[-1]}"


def until_program(frames: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield frames until the innermost one outside of installed packages, the program's own."""
    for file, number in frames:
        yield file, number
        if "site-packages" not in file and not _is_internal(file):
            return


def _is_internal(file: str) -> bool:
    """Return whether a file belongs to PyTorch, to Python or to this package."""
    is_python = file.startswith(_python_folder) and "site-packages" not in file
    return is_python or file.startswith((_torch_folder, _own_folder, "<"))


# ---- memory of the device on the host


@cache
def _arena() -> tuple[Any, int]:
    """Return the memory of all devices, and its address."""
    num_bytes = ctypes.c_ulonglong()
    stub = ctypes.CDLL("libcudastub.so")
    stub.cudastub_arena.restype = ctypes.c_void_p
    start: int = stub.cudastub_arena(ctypes.byref(num_bytes))
    return (ctypes.c_char * num_bytes.value).from_address(start), start


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU view of a tensor of the emulated device, whose memory is on the host."""
    if not tensor.is_cuda:
        return tensor
    size, stride = tensor.size(), tensor.stride()
    if not tensor.numel():
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device="cpu")
    memory, start = _arena()
    # Elements from the first to the last one of the tensor.
    span = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    offset = tensor.data_ptr() - start
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=span, offset=offset)
    view = flat.as_strided(size, stride)
    return view.conj() if tensor.is_conj() else view


@cache
def _places_in_storage() -> tuple[int, int]:
    """Return the indices of the words of a storage that hold its address and size.

    Python's object of a storage would be a lasting reference to it: backward would not accumulate
    gradients in place, and memory would differ.
    """
    probe = torch.empty(123_457, dtype=torch.uint8, device="cpu")
    words = (ctypes.c_int64 * 16).from_address(_C._storage_address(probe))
    return list(words).index(probe.data_ptr()), list(words).index(len(probe))


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the bytes of a tensor's storage."""
    words = (ctypes.c_int64 * 16).from_address(_C._storage_address(tensor))
    address, size = _places_in_storage()
    return words[address], words[size]


def _is_exact(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether the values of this tensor's storage are kept."""
    # A nested tensor has no shape.
    if tensor.is_nested:
        return False
    # Control flow depends on integers and flags, so more of them are kept.
    limit = MAX_INTEGER_BYTES if _is_exact(tensor) else MAX_FLOATS * tensor.element_size()
    num_bytes = tensor.nbytes
    if tensor.is_cuda:
        # A view has the values of its storage.
        _, num_bytes = _storage(tensor)
    return num_bytes <= limit


def _why_made_up(tensors: Iterable[torch.Tensor]) -> str | None:
    """Return why the values of these tensors are made up: a large tensor, or the operator that was
    not computed; None if they are real.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            if not has_values(tensor):
                return "a large tensor"
            origin = _origins.get(_storage(tensor)[0])
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
        made_up[kind, origin, program_line()] += 1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value; raise for sparse ones."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            _refuse_sparse()
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


# ---- defaults


def _fill_default(tensor: torch.Tensor, name: str, args: Any = (), dim: int | None = None) -> None:
    """Write harmless defaults into a small tensor that an operator could not compute."""
    if not tensor.numel() or not has_values(tensor):
        return
    host = on_host(tensor)
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if tensor.dtype == torch.bool:
        # A comparison with itself looks for NaN: there `ne` is the alarm, and `eq` is none.
        is_with_itself = name in ("eq", "ne") and len(args) > 1 and args[0] is args[1]
        is_alarm = (name in _ALARMS) != is_with_itself
        host.fill_(not is_alarm)
    elif not _is_exact(tensor):
        host.fill_(1)
    elif name in _POSITIONS and first is not None and first.dim() and dim is not None:
        # Positions 0, 1, 2, ... along the dimension that the operator has searched.
        rows = host if tensor.dim() < first.dim() else host.movedim(dim, -1)
        numbers = torch.arange(tensor.numel(), device="cpu")
        rows.copy_((numbers % max(first.size(dim), 1)).view(rows.shape))
    else:
        host.zero_()


def _alternate(flag: torch.Tensor) -> None:
    """Make a flag false at every second call of a line. So both branches of the program run, and
    loops end that run until no element is out of bounds (`trunc_normal_`).
    """
    if flag.numel() == 1 and on_host(flag).item():
        line = program_line()
        on_host(flag).fill_(line not in _lines_with_any)
        # Add the line if it is not in the set, else remove it.
        _lines_with_any.symmetric_difference_update([line])


# ---- operators


class _Operator:
    """The kernel of one operator: CUDA's, then the values of its small results."""

    def __init__(self, operator: Any, cuda_kernel: Any) -> None:
        schema = operator._schema
        self.operator, self.cuda_kernel = operator, cuda_kernel
        self.name: str = schema.name.removeprefix("aten::")
        self.defaults = {argument.name: argument.default_value for argument in schema.arguments}
        self.positional = [each.name for each in schema.arguments if not each.kwarg_only]
        self.keyword_only = [each.name for each in schema.arguments if each.kwarg_only]
        self.tensors = [
            argument.name
            for argument in schema.arguments
            if str(argument.type) in ("Tensor", "Optional[Tensor]")
        ]
        self.written = [
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.in_place = [name for name in self.written if name in self.positional]
        # The former values of `out=` are not read, and a new `out` is resized to old memory.
        self.read = {*self.positional, *self.keyword_only} - {*self.written} | {*self.in_place}
        has_kernel = _C._dispatch_has_computed_kernel_for_dispatch_key
        full_name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        self.has_cpu_kernel: bool = has_kernel(full_name, "CPU")

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**self.defaults, **dict(zip(self.positional, args, strict=False)), **kwargs}
        first_tensor = next(_tensors(given), None)
        for name in self.tensors:
            given[name] = _as_tensor(given[name], first_tensor)
        seed = _seed(given["generator"]) if "generator" in given else None
        in_place = _tensors([given[name] for name in self.in_place])
        before = [(one, on_host(one).clone()) for one in in_place if has_values(one)]
        result = self._call(partial(self.cuda_kernel.call_boxed, keyset), given)
        read = list(_tensors([value for name, value in given.items() if name in self.read]))
        written = list(_tensors([given[name] for name in self.written]))
        outputs = [tensor for tensor in written or _tensors(result) if tensor.is_cuda]
        have_values = all(map(has_values, [*read, *outputs]))
        if self.name in _OVERWRITING and outputs and outputs[0].nbytes == _storage(outputs[0])[1]:
            # The operator fills the whole storage, so it does not depend on the former values.
            del read[0]
        origin = _why_made_up(read)
        is_made_up_position = origin is not None and self.name in _POSITIONS
        # Compute small results on the CPU, at the addresses of the CUDA kernel's.
        if self.has_cpu_kernel and have_values and not is_made_up_position:
            # The CUDA kernel may have called other operators, which have changed the arguments.
            for tensor, content in before:
                on_host(tensor).copy_(content)
            # A CPU kernel may lack a dtype, or refuse values that were not computed. Then the
            # results get defaults below.
            with suppress(Exception):
                values = self._compute(given, seed)
                if not written:
                    for output, value in zip(_tensors(result), _tensors(values), strict=False):
                        if output.is_cuda and output.shape == value.shape:
                            on_host(output).copy_(value)
                for output in outputs:
                    _set_origin(output, origin)
                    if origin is not None and output.is_floating_point():
                        on_host(output).masked_fill_(on_host(output).isnan(), 1)
                if self.name == "any" and origin in _COMPARISONS:
                    _alternate(outputs[0])
                return values if self.name == "equal" else result
        # The results are not computed: write defaults into the small ones.
        origin = origin or self.name
        # Operators on lists update parameters and states in place, whose values stay as they are.
        updates_list = bool(written) and ("foreach" in self.name or "fused" in self.name)
        for tensor in outputs:
            if not updates_list:
                arguments = [*given.values()]
                _fill_default(tensor, self.name.rstrip("_"), arguments, given.get("dim", -1))
            _set_origin(tensor, self.name if origin == "a large tensor" else origin)
        if self.name == "equal":
            _note("value", origin)
            return True
        return result

    def _compute(self, given: dict[str, Any], seed: int | None) -> Any:
        on_cpu = {name: _to_host(value) for name, value in given.items()}
        if seed is not None:
            on_cpu["generator"] = torch.Generator().manual_seed(seed)
        return self._call(self.operator, on_cpu)

    def _call(self, function: Callable[..., Any], given: dict[str, Any]) -> Any:
        positional = [given[name] for name in self.positional]
        return function(*positional, **{name: given[name] for name in self.keyword_only})


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return on_host(value)
    if isinstance(value, list | tuple):
        return [_to_host(one) for one in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


def _as_tensor(value: Any, first_tensor: torch.Tensor | None) -> Any:
    """Return a number as a tensor that does not change the type of the result."""
    if not isinstance(value, int | float | complex):
        return value
    dtype = None if first_tensor is None else torch.result_type(first_tensor, value)
    return torch.tensor(value, dtype=dtype, device="cpu")


def _seed(generator: torch.Generator | None) -> int:
    """Return a seed derived from the state of an operator's generator."""
    if generator is None:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
    try:
        offset = generator.get_offset()
    except RuntimeError:
        # While a CUDA graph is captured, the offset is unknown.
        offset = 0
    return (generator.initial_seed() * 1000003 + offset) % 2**63


def _copy(
    kernel: _Operator,
    keyset: Any,
    target: torch.Tensor,
    source: torch.Tensor,
    non_blocking: bool = False,
) -> torch.Tensor:
    if target.is_cuda:
        return kernel(keyset, target, source, non_blocking)  # type: ignore[no-any-return]
    kernel.cuda_kernel.call_boxed(keyset, target, source, non_blocking)
    if has_values(source):
        target.copy_(on_host(source))
        _note("value", _origins.get(_storage(source)[0]))
    elif target.numel() <= MAX_FLOATS:
        target.fill_(0 if _is_exact(target) else 1)
        _note("value", "a large tensor")
    return target


def _read_number(_: _Operator, keyset: Any, tensor: torch.Tensor) -> Any:
    if has_values(tensor):
        _note("value", _origins.get(_storage(tensor)[0]))
        return on_host(tensor).item()
    _note("value", "a large tensor")
    return torch.ones((), dtype=tensor.dtype, device="cpu").item()


def _resize(
    kernel: _Operator, keyset: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Keep values as a storage grows: CUDA's kernel moves them by a copy that computes nothing."""
    _, old_bytes = _storage(tensor)
    old_length = old_bytes // tensor.element_size()
    flat = tensor.as_strided((old_length,), (1,), 0)
    old_values = on_host(flat).clone() if has_values(tensor) else None
    kernel.cuda_kernel.call_boxed(keyset, tensor, *args, **kwargs)
    if old_values is not None and tensor.numel() > old_length and has_values(tensor):
        on_host(tensor.as_strided((old_length,), (1,), 0)).copy_(old_values)
    return tensor


def _pow_of_number(_: _Operator, keyset: Any, base: Any, exponent: torch.Tensor) -> torch.Tensor:
    """Call pow with an ordinary tensor for the base. PyTorch's own kernel marks that tensor as a
    number, and an assertion of PyTorch refuses to pass it to Python.
    """
    dtype = torch.result_type(base, exponent)
    return torch.pow(torch.full((), base, dtype=dtype, device=exponent.device), exponent)


def _on_host_only(
    kernel: _Operator,
    keyset: Any,
    tensor: torch.Tensor,
    *args: Any,
    returns_values: bool,
    **kwargs: Any,
) -> Any:
    """Compute on the CPU alone: CUDA's kernel would read the size of its result on the device. The
    temporaries of CUDA's kernel are missing from the peak.

    Args:
        kernel: operator, with a CPU kernel.
        keyset: not used.
        tensor: first argument of the operator.
        *args: its other positional arguments.
        returns_values: whether the first result has values of the tensor; the others are indices
            and counts.
        **kwargs: its keyword arguments.
    """
    origin = _why_made_up([tensor])
    _note("shape", origin)
    if has_values(tensor):
        host = on_host(tensor)
    else:
        # Elements that are different and not zero give the largest result. In the dtype of the
        # tensor, large numbers might be equal.
        numbers = torch.arange(1, tensor.numel() + 1, device="cpu")
        host = numbers.view(tensor.shape)
    results: list[torch.Tensor] = []
    for values in _tensors(kernel.operator(host, *args, **kwargs)):
        dtype = tensor.dtype if returns_values and not results else values.dtype
        results.append(torch.empty_like(values, dtype=dtype, device=tensor.device))
        if has_values(results[-1]):
            on_host(results[-1]).copy_(values)
        _set_origin(results[-1], origin)
    return results[0] if len(results) == 1 else tuple(results)


def _refuse_sparse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "adaptive-batch emulate does not support sparse CUDA tensors; use dense ones, such as"
        " nn.Embedding with sparse=False"
    )


def _empty(kernel: _Operator, keyset: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = kernel.cuda_kernel.call_boxed(keyset, *args, **kwargs)
    _fill_default(result, "empty")
    _set_origin(result, None)
    return result


def _fill_what_compiled_code_allocates() -> None:
    """Write defaults into the results of Inductor's kernels, which are not operators."""
    guards = _C._dynamo.guards
    allocate = guards._empty_strided_cuda

    def empty_strided_cuda(*args: Any) -> torch.Tensor:
        result: torch.Tensor = allocate(*args)
        _fill_default(result, "compiled")
        _set_origin(result, "a compiled kernel" if has_values(result) else None)
        return result

    guards._empty_strided_cuda = empty_strided_cuda

"""Compiled parts of a model on fake tensors: at most the memory that ``torch.compile`` needs.

A part goes through Dynamo and AOTAutograd as it does for Inductor: with Inductor's decompositions,
its passes over the joint graph of forward and backward, and the partitioner that decides what
forward saves. No kernel is generated. A call of a graph allocates by one rule:

* An operator that Inductor generates no kernel for (a matrix product, attention, a scatter) writes
  its results to memory.
* All others are fused. One writes its result to memory where the graph returns it, where an
  operator of the first kind reads it, where it is a reduction, or where it reads many tensors.
  Otherwise the kernels that read its result compute it.
* Nothing is written over. Kernels that Inductor may fuse free what they read once the last of them
  is done.

Inductor's own order is another, so `MARGIN` is added to the peak. ``adaptive-batch emulate`` counts
the exact one.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import replaced
from adaptive_batch.errors import SettingError

from .cuda_operators import CudaKernels, real_functions

private = PrivateNames("memory estimates")

if TYPE_CHECKING:
    from .fake_step import FakeDevice

# What is added to the peak that is counted. Without it 0.25% too little was allocated, and 0.3%
# reserved, in the worst of 40 whole models (benchmarks/cuda_stack.py --recount --only compiled).
MARGIN = 0.03

# torch/_inductor/config.py: realize_reads_threshold, realize_acc_reads_threshold. A value with
# several readers is written to memory above the first, any value above the second.
_MANY_READS = 4
_MOST_READS = 8

_REDUCTIONS = {
    *("sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "argmax"),
    *("argmin", "var", "var_mean", "cumsum", "linalg_vector_norm"),
    "prepare_softmax_online",
}
# Those that PyTorch does not tag as pointwise.
_POINTWISE = {
    *("clone", "cat", "full", "full_like", "empty", "arange", "copy", "index", "gather"),
    *("embedding", "constant_pad_nd", "flip", "repeat", "select_scatter", "slice_scatter"),
    *("scalar_tensor", "triu", "tril", "convert_element_type", "iota", "fma"),
    *("inductor_seeds", "inductor_lookup_seed", "inductor_random"),
}
_CUDA_GRAPHS = (
    "CUDA graphs keep memory in pools of their own, which are not simulated; compile without"
    ' mode="reduce-overhead", "max-autotune" (estimate it as "max-autotune-no-cudagraphs"),'
    " TORCHINDUCTOR_CUDAGRAPHS=1 and TORCH_COMPILE_BACKEND=cudagraphs, or run adaptive-batch"
    " emulate"
)


def check_compiler() -> str | None:
    """Return why what torchtune compiles cannot be estimated; None where it can.

    Raises:
        SettingError: Inductor is set to record CUDA graphs.
    """
    # torchtune's variable.
    backend = os.environ.get("TORCH_COMPILE_BACKEND", "inductor")
    config = private("torch._inductor.config", "triton")
    if config.triton.cudagraphs or backend == "cudagraphs":
        raise SettingError("compile", True, _CUDA_GRAPHS)
    return None if backend == "inductor" else f"TORCH_COMPILE_BACKEND={backend} is not inductor"


class CompiledParts:
    """Compiles functions that run on a fake device.

    Args:
        device: it runs on.

    Attributes:
        left_out: parts that are counted as the eager program, a sentence each.
    """

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._made: list[Callable[..., Any]] = []
        self._is_bare = False
        self.left_out: list[str] = []

    def take_over_modules(self, model: nn.Module) -> None:
        """Replace what ``Module.compile`` has compiled in a model."""
        for module in model.modules():
            if module._compiled_call_impl is not None:
                vars(module).update(self._taken_over(module))

    def _taken_over(self, module: nn.Module) -> dict[str, Any]:
        """Return the attributes by which a compiled module runs here, or the wrapper that
        ``torch.compile`` returned.
        """
        if _is_wrapper(module):
            original: Any = module._orig_mod
            return {"forward": self.compiled(original, type(original).__name__)}
        # Hooks of the module itself stay outside.
        forward = self.compiled(module.forward, type(module).__name__)
        return {"forward": forward, "_compiled_call_impl": module._call_impl}

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Context manager: count what a script has compiled in a model as compiled.

        What cannot be counted so is counted as the eager program, which `left_out` names.

        Raises:
            SettingError: a module records CUDA graphs.
        """
        with ExitStack() as restored:
            # One may have a place in several.
            for module in list(dict.fromkeys(_compiled_modules(model))):
                name = type(module).__name__
                compiled: Any = module._compiled_call_impl
                if _is_wrapper(module):
                    name = type(module._orig_mod).__name__
                    compiled = module
                # The compiler may be switched off.
                get_config = getattr(compiled, "get_compiler_config", None)
                if get_config is None:
                    continue
                config = get_config()
                if config is None:
                    self._leave_out(name, "its backend is not inductor")
                    continue
                if config["triton.cudagraphs"]:
                    raise SettingError("model", f"{name} compiled with CUDA graphs", _CUDA_GRAPHS)
                restored.enter_context(replaced(module, **self._taken_over(module)))
            for module in model.modules():
                forward = vars(module).get("forward")
                if hasattr(forward, "_torchdynamo_orig_callable") and not _is_wrapper(module):
                    reason = "its forward is compiled, not the module; give module.compile()"
                    self._leave_out(type(module).__name__, reason)
            if self._made:
                # Of the hooks that name modules for the estimate.
                restored.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)`")
                # Each size that was tried is a variant of the same code, of which training may have
                # a few before it continues without the compiler.
                restored.callback(torch.compiler.reset)
            yield

    def take_over_attributes(self, loss: Any) -> None:
        """Replace what ``torch.compile`` has returned for functions and modules of a loss."""
        if not isinstance(loss, nn.Module):
            return
        for name, function in vars(loss).items():
            original = getattr(function, "_torchdynamo_orig_callable", None)
            if original in self._made:
                setattr(loss, name, original)
            elif original is not None:
                setattr(loss, name, self.compiled(original, f"{type(loss).__name__}.{name}"))
        for name, module in list(loss.named_children()):
            if not _is_wrapper(module):
                continue
            part: Any = module._orig_mod
            if part.forward not in self._made:
                part.forward = self.compiled(part.forward, f"{type(loss).__name__}.{name}")
            setattr(loss, name, part)

    def compiled(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a function that allocates what the compiled one would.

        Args:
            name: of the function, for messages.
        """
        exceptions = private("torch._dynamo.exc", "TorchDynamoException")
        # Rows of another number or length are another graph, as the first ones of a run are.
        run = torch.compile(function, backend=self._backend, dynamic=False, fullgraph=True)
        is_eager = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_eager
            if not is_eager:
                try:
                    with self._bare():
                        return run(*args, **kwargs)
                except exceptions.TorchDynamoException as error:
                    is_eager = True
                    # A backend's error comes within one that names the backend.
                    inner = getattr(error, "inner_exception", error)
                    reason = f"{type(inner).__name__}: {str(inner).strip().splitlines()[0]}"
                    self._leave_out(name, f"it is not one graph ({reason})")
            return function(*args, **kwargs)

        call.is_compiled = True  # type: ignore[attr-defined]
        self._made.append(call)
        return call

    def _leave_out(self, name: str, reason: str) -> None:
        sentence = f"{name} is compiled, but counted as the eager program: {reason}"
        if sentence not in self.left_out:
            self.left_out.append(sentence)

    @contextmanager
    def _bare(self) -> Iterator[None]:
        """Inside, nothing is in place that Dynamo would refuse, or make part of a graph."""
        with ExitStack() as contexts:
            contexts.enter_context(replaced(self, _is_bare=True))
            contexts.enter_context(_no_function_modes())
            contexts.enter_context(real_functions())
            contexts.enter_context(private.disable_current_modes())
            contexts.enter_context(torch.compiler.set_stance("default"))
            limits = {"recompile_limit": 2**20, "accumulated_recompile_limit": 2**20}
            config = private("torch._dynamo.config", "patch", *limits)
            contexts.enter_context(config.patch(limits))
            contexts.enter_context(self._device.mode)
            yield

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        backends = private("torch._dynamo.backends.common", "aot_autograd")
        inductor = private("torch._inductor.compile_fx", "select_decomp_table")
        kernels = self._device.kernels
        if kernels:
            # What is checkpointed is a graph of its own, within this one.
            for part in graph.modules():
                if isinstance(part, fx.GraphModule):
                    _give_attention(part, kernels)
        compile_graph = backends.aot_autograd(
            fw_compiler=self._call,
            bw_compiler=self._call,
            partition_fn=_partitioned,
            decompositions=inductor.select_decomp_table(),
        )
        compiled: Callable[..., Any] = compile_graph(graph, inputs)
        return compiled

    def _call(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        _check_operators(graph.graph)
        memory = GraphMemory(graph.graph)
        self._device.margin = MARGIN

        def call(args: list[Any]) -> list[Any]:
            with self._device.counted() if self._is_bare else nullcontext():
                return memory.allocate(args)

        # Arguments are freed inside.
        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _partitioned(*args: Any, **kwargs: Any) -> Any:
    """Divide a graph of forward and backward as Inductor does."""
    inductor = private("torch._inductor.compile_fx", "partition_fn")
    guards = private("torch._guards", "TracingContext")
    virtualized = private("torch._inductor.virtualized", "V")
    # Passes that replace random numbers make fake tensors, which have to be of the graph's mode.
    with virtualized.V.set_fake_mode(guards.TracingContext.get().fake_mode):
        forward, backward = inductor.partition_fn(*args, **kwargs)
    # Once backward runs, it is too late for the eager program.
    _check_operators(backward.graph)
    return forward, backward


def _check_operators(graph: fx.Graph) -> None:
    """Refuse operators that run others, as those do that stand for one that writes to its
    arguments.
    """
    for node in graph.nodes:
        is_known = isinstance(node.target, private.OpOverload) or node.op != "call_function"
        if not is_known and not isinstance(node.target, BuiltinFunctionType):
            names = [str(node.target), *map(str, node.args[:1])]
            raise NotImplementedError(f"what {' of '.join(names)} allocates is not known")


def _give_attention(graph: fx.GraphModule, kernels: CudaKernels) -> None:
    """Let a graph call the attention that CUDA takes."""
    for node in graph.graph.nodes:
        if node.target is nn.functional.scaled_dot_product_attention:
            node.target = kernels.attention_operator
        elif node.target is torch.ops.adaptive_batch.packed_attention.default:
            _check_packed_rows(node, kernels)
    graph.recompile()


def _check_packed_rows(node: fx.Node, kernels: CudaKernels) -> None:
    """Refuse packed rows whose attention leaves the graph, as no kernel takes rows of several
    lengths.
    """
    # [tokens, heads, head_dim] each.
    tensors = [operand.meta["example_value"] for operand in node.all_input_nodes[:3]]
    if not kernels.takes_packed_rows(*(tensor.transpose(0, 1)[None] for tensor in tensors)):
        raise NotImplementedError("the attention of packed rows is a call for each row there")


def _compiled_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the compiled modules in a module, but those within others, which these compile."""
    if _is_wrapper(module) or module._compiled_call_impl is not None:
        yield module
        return
    for child in module.children():
        yield from _compiled_modules(child)


def _is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is what ``torch.compile`` returned for another; what only forwards
    attributes to such a one is not.
    """
    return "_orig_mod" in module._modules


class GraphMemory:
    """At most what a graph of operators allocates when Inductor has compiled it.

    Args:
        graph: ATen operators, with fake tensors as ``meta["val"]``.
    """

    def __init__(self, graph: fx.Graph) -> None:
        *self._nodes, self._output = graph.nodes
        self._arguments = [node for node in self._nodes if node.op == "placeholder"]
        # The node whose memory a node's result lies in.
        self._roots: dict[fx.Node, fx.Node] = {}
        self._users: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            operands = [self._roots[operand] for operand in node.all_input_nodes]
            self._roots[node] = operands[0] if _is_view(node) else node
            for operand in () if _is_view(node) else operands:
                self._users.setdefault(operand, []).append(node)
        # The memory that each node reads: that of a fused operand's operands.
        self._reads: dict[fx.Node, set[fx.Node]] = {}
        self._written = set(self._arguments)
        last_readers: dict[fx.Node, fx.Node] = {}
        self._kernels: list[fx.Node] = []
        for node in graph.nodes:
            self._reads[node] = self._memory_read_by(node)
            is_kernel = _has_several_results(node)
            if self._roots[node] is node and self._is_written(node):
                self._written.add(node)
                is_kernel = not _takes_result(node)
                last_readers[node] = node if is_kernel else node.all_input_nodes[0]
            if is_kernel:
                self._kernels.append(node)
            if is_kernel or node is self._output:
                last_readers.update(dict.fromkeys(self._reads[node], node))
        places = {node: place for place, node in enumerate(graph.nodes)}
        for kernel, last in self._fused_with().items():
            for memory in (*self._reads[kernel], *_results_of(kernel)):
                ends = (last_readers.get(memory, kernel), last)
                last_readers[memory] = max(ends, key=places.__getitem__)
        self._freed_after: dict[fx.Node, list[fx.Node]] = {}
        for memory, reader in last_readers.items():
            self._freed_after.setdefault(reader, []).append(memory)

    def _fused_with(self) -> dict[fx.Node, fx.Node]:
        """Return the last kernel that Inductor may fuse each kernel with: loops of one size that
        share memory, of which none needs what an unfused operator makes of another's result.
        """
        last: dict[fx.Node, fx.Node] = {}
        makers: dict[fx.Node, fx.Node] = {}
        touched: dict[fx.Node, set[fx.Node]] = {}
        # All kernels before each one, and those before it with an unfused operator between.
        earlier: dict[fx.Node, set[fx.Node]] = {}
        apart: dict[fx.Node, set[fx.Node]] = {}
        for kernel in self._kernels:
            earlier[kernel] = set()
            apart[kernel] = set()
            for maker in {makers[memory] for memory in self._reads[kernel] if memory in makers}:
                earlier[kernel] |= {maker, *earlier[maker]}
                apart[kernel] |= apart[maker] if _is_fused(maker) else earlier[maker]
            makers.update(dict.fromkeys(_results_of(kernel), kernel))
            if not _is_fused(kernel):
                continue
            size = _loop_size(kernel)
            others = {
                other
                for other in touched
                if other not in apart[kernel] and _loop_size(other) == size
            }
            shared = touched[kernel] = {*self._reads[kernel], *_results_of(kernel)}
            while near := {other for other in others if touched[other] & shared}:
                shared = shared.union(*(touched[other] for other in near))
                last.update(dict.fromkeys(near, kernel))
                others -= near
        return last

    def _memory_read_by(self, node: fx.Node) -> set[fx.Node]:
        reads: set[fx.Node] = set()
        for operand in () if _takes_result(node) else node.all_input_nodes:
            root = self._roots[operand]
            reads |= {root} if root in self._written else self._reads[root]
        return reads

    def _is_written(self, node: fx.Node) -> bool:
        if node.op != "call_function" or _has_several_results(node):
            return False
        users = self._users.get(node, [])
        if not _is_fused(node) or _is_reduction(node) or not all(map(_is_fused, users)):
            return True
        num_reads = len(self._reads[node])
        return num_reads > _MOST_READS or (len(users) > 1 and num_reads > _MANY_READS)

    def allocate(self, args: list[Any]) -> list[Any]:
        """Allocate and free what a call does, and return its results.

        Args:
            args: of the graph; the list is emptied.
        """
        memory: dict[fx.Node, Any] = dict(zip(self._arguments, args, strict=True))
        args.clear()
        for node in self._kernels:
            if not _is_fused(node):
                results = self._run(node, memory)
            elif _has_several_results(node):
                results = list(map(_empty_like, node.meta["val"]))
            else:
                results = _empty_like(node.meta["val"])
            if _has_several_results(node):
                memory.update({user: results[user.args[1]] for user in node.users})
            else:
                memory[node] = results
            del results
            for operand in self._freed_after.get(node, ()):
                memory.pop(operand, None)
        results = self._output.args[0]
        assert isinstance(results, list | tuple)
        return [self._tensor(result, memory) for result in results]

    def _run(self, node: fx.Node, memory: dict[fx.Node, Any]) -> Any:
        """Run an operator that is not fused, so that what it needs is counted as elsewhere."""
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda operand: self._tensor(operand, memory)
        )
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _tensor(self, node: Any, memory: dict[fx.Node, Any]) -> Any:
        """Return the result of a node, which may be a view of another's."""
        if not isinstance(node, fx.Node):
            return node
        tensor = memory.get(self._roots[node])
        value = node.meta["val"]
        is_whole = node is self._roots[node] and node.op == "placeholder"
        if is_whole or not isinstance(value, torch.Tensor):
            return tensor
        if tensor is None:
            # A number that is a tensor, which a kernel has in its code.
            return _empty_like(value)
        if tensor.dtype != value.dtype:
            tensor = tensor.view(value.dtype)
        layout = (value.shape, value.stride(), value.storage_offset())
        if (tensor.shape, tensor.stride(), tensor.storage_offset()) == layout:
            return tensor
        # To autograd, results of Inductor's code are no views, which hooks of FSDP warn about.
        return tensor.as_strided(*layout).data


def _empty_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _has_several_results(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _takes_result(node: fx.Node) -> bool:
    """Return whether a node is one of another's results."""
    return node.target is operator.getitem and not _is_view(node)


def _results_of(kernel: fx.Node) -> list[fx.Node]:
    return list(kernel.users) if _has_several_results(kernel) else [kernel]


def _loop_size(kernel: fx.Node) -> int:
    """Return how many elements a fused kernel computes or, in a reduction, reads."""
    node = kernel.all_input_nodes[0] if _is_reduction(kernel) else _results_of(kernel)[0]
    value = node.meta["val"]
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        # A part of what is divided, as by split.
        return _is_view(node.all_input_nodes[0])
    if not isinstance(node.target, private.OpOverload):
        return False
    return _name(node) == "_unsafe_view" or any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in node.target._schema.arguments
    )


def _is_reduction(node: fx.Node) -> bool:
    return _name(node) in _REDUCTIONS


def _is_fused(node: fx.Node) -> bool:
    """Return whether Inductor generates the kernel of a node."""
    if not isinstance(node.target, private.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or _name(node) in _POINTWISE | _REDUCTIONS


def _name(node: fx.Node) -> str:
    """Return an operator's name, without its namespace and overload."""
    if not isinstance(node.target, private.OpOverload):
        return ""
    name: str = node.target._schema.name
    return name.partition("::")[2]


@contextmanager
def _no_function_modes() -> Iterator[None]:
    with ExitStack() as restored:
        while private.num_torch_function_modes():
            restored.callback(private.push_torch_function_mode, private.pop_torch_function_mode())
        yield

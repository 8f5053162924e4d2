"""Compiled parts of a model on fake tensors: at most the memory that ``torch.compile`` needs.

A part goes through Dynamo and AOTAutograd as it does for Inductor: with Inductor's decompositions,
its passes over the joint graph of forward and backward, and the partitioner that decides what
forward saves. No kernel is generated. A call of a graph allocates by one rule:

* An operator that Inductor generates no kernel for (a matrix product, attention, a scatter) writes
  its results to memory.
* All others are fused. One writes its result to memory where it is a reduction, where the graph
  returns it, or where an operator of the first kind reads it. Otherwise the kernels that read its
  result compute it.
* Nothing is written over. Kernels that Inductor may fuse free what they read once the last of them
  is done.

Inductor's own order is another, so `MARGIN` is added to the peak. ``adaptive-batch emulate`` counts
the exact one.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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

# What is added to the peak that is counted. Without it 0.25% too little was allocated, and 0.9%
# reserved, in the worst of 40 whole models (benchmarks/cuda_stack.py --recount --only compiled).
MARGIN = 0.03

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
    config: Any = torch.compile(nn.Identity())
    if config.get_compiler_config()["triton.cudagraphs"] or backend == "cudagraphs":
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
        self._has_compiled = False
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
            if self._has_compiled:
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
            if original is not None:
                setattr(loss, name, self.compiled(original, f"{type(loss).__name__}.{name}"))
        for name, module in list(loss.named_children()):
            if not _is_wrapper(module):
                continue
            part: Any = module._orig_mod
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

        self._has_compiled = True
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
            contexts.enter_context(private.no_torch_functions())
            contexts.enter_context(real_functions())
            contexts.enter_context(private.disable_current_modes())
            contexts.enter_context(torch.compiler.set_stance("default"))
            limits = {"recompile_limit": 2**20, "accumulated_recompile_limit": 2**20}
            config: Any = torch.compiler.config
            contexts.enter_context(config.patch(limits))
            contexts.enter_context(self._device.mode)
            yield

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Importing it takes a while.
        from functorch.compile import (  # type: ignore[import-untyped]
            aot_module_simplified,
        )

        inductor = private("torch._inductor.compile_fx", "select_decomp_table")
        kernels = self._device.kernels
        if kernels:
            # What is checkpointed is a graph of its own, within this one.
            for part in graph.modules():
                if isinstance(part, fx.GraphModule):
                    _give_attention(part, kernels)
        compiled: Callable[..., Any] = aot_module_simplified(
            graph,
            inputs,
            fw_compiler=self._call,
            bw_compiler=self._call,
            partition_fn=_partitioned,
            decompositions=inductor.select_decomp_table(),
        )
        return compiled

    def _call(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        _check_operators(graph.graph)
        compiled = CompiledGraph(graph)
        self._device.margin = MARGIN

        def call(args: list[Any]) -> list[Any]:
            with self._device.counted() if self._is_bare else nullcontext():
                results: list[Any] = compiled.boxed_run(args)
                # It would refer to the results as long as the graph exists.
                compiled.env.clear()
                return results

        # Arguments are freed inside.
        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _partitioned(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Divide a graph of forward and backward as Inductor does."""
    # Once backward runs, it is too late for the eager program.
    _check_operators(joint.graph)
    inductor = private("torch._inductor.compile_fx", "partition_fn")
    virtualized = private("torch._inductor.virtualized", "V")
    # Passes that replace random numbers make fake tensors, which have to be of the graph's mode.
    argument, *_ = joint.graph.nodes
    with virtualized.V.set_fake_mode(argument.meta["val"].fake_mode):
        return inductor.partition_fn(joint, *args, **kwargs)


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
            node.target = kernels.attention
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
    return "_orig_mod" in dict(module.named_children())


class CompiledGraph(fx.Interpreter):
    """Allocates at most what a graph of operators does once Inductor has compiled it.

    Args:
        module: ATen operators, with fake tensors as ``meta["val"]``.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._kernels = _fuse(module.graph)
        super().__init__(module)

    def run_node(self, n: fx.Node) -> Any:
        """Allocate the results of a generated kernel; run any other node."""
        # Kernels have constants in their code.
        if n in self._kernels or n.op == "get_attr":
            return private.tree_map_only(torch.Tensor, _empty_like, n.meta["val"])
        result = super().run_node(n)
        # To autograd, results of Inductor's code are no views, which hooks of FSDP warn about.
        return result.data if _is_view(n) and isinstance(result, torch.Tensor) else result


def _empty_like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _fuse(graph: fx.Graph) -> set[fx.Node]:
    """Remove the operators whose results are not written to memory. Each operator that reads them
    reads their operands instead.

    Returns:
        The fused operators that are left: one for each kernel.
    """
    written: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_computed_by_readers = _is_fused(node) or _is_view(node)
        is_read = any(user in written and not _is_fused(user) for user in node.users)
        if is_read or _name(node) in _REDUCTIONS or not is_computed_by_readers:
            written.add(node)
    # Elements that a kernel loops over.
    sizes: dict[fx.Node, int] = {}
    # Nodes in order, as graphs alike have to allocate alike.
    memory_of: dict[fx.Node, dict[fx.Node, None]] = {}
    for node in graph.nodes:
        reads: dict[fx.Node, None] = {}
        for operand in node.all_input_nodes:
            reads.update(memory_of[operand])
        memory_of[node] = {node: None} if node in written else reads
        if node in written and _is_fused(node):
            looped = node.all_input_nodes[0] if _name(node) in _REDUCTIONS else node
            sizes[node] = _num_elements(looped.meta["val"])
            node.args = (list(reads),)
            node.kwargs = {}
    for node in reversed(graph.nodes):
        if node not in written:
            graph.erase_node(node)
    _keep_until_fused(graph, sizes)
    return set(sizes)


def _keep_until_fused(graph: fx.Graph, sizes: Mapping[fx.Node, int]) -> None:
    """Keep what a kernel touches until the last kernel is done that Inductor may fuse it with:
    loops of one size that share memory, of which none needs what another operator makes of a
    result of the other.

    Args:
        sizes: of the loops of the graph's kernels.
    """
    memory: dict[fx.Node, fx.Node] = {}
    earlier: dict[fx.Node, set[fx.Node]] = {}
    # The earlier nodes with another operator between.
    apart: dict[fx.Node, set[fx.Node]] = {}
    touched: dict[fx.Node, set[fx.Node]] = {}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        operands = node.all_input_nodes
        is_part = node.target is operator.getitem or _is_view(node)
        memory[node] = memory[operands[0]] if is_part else node
        earlier[node] = set(operands).union(*map(earlier.__getitem__, operands))
        is_other = not is_part and node not in sizes
        apart[node] = earlier[node] if is_other else set().union(*map(apart.__getitem__, operands))
        if node not in sizes:
            continue
        others = {
            other for other in touched if other not in apart[node] and sizes[other] == sizes[node]
        }
        shared = touched[node] = {node, *map(memory.__getitem__, operands)}
        while near := {other for other in others if touched[other] & shared}:
            shared = shared.union(*map(touched.__getitem__, near))
            last.update(dict.fromkeys(near, node))
            others -= near
    for kernel, later in last.items():
        later.args = ([*later.all_input_nodes, kernel, *touched[kernel]],)


def _num_elements(values: Any) -> int:
    first = values[0] if isinstance(values, tuple | list) else values
    return first.numel() if isinstance(first, torch.Tensor) else 0


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        # A part of what is divided, as by split.
        return _is_view(node.all_input_nodes[0])
    return _name(node) == "_unsafe_view" or bool(getattr(node.target, "is_view", False))


def _is_fused(node: fx.Node) -> bool:
    """Return whether Inductor generates the kernel of a node."""
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return is_pointwise or _name(node) in _POINTWISE | _REDUCTIONS


def _name(node: fx.Node) -> str:
    """Return an operator's name, without its namespace and overload."""
    if not isinstance(node.target, private.OpOverload):
        return ""
    return str(node.target.name()).partition("::")[2].partition(".")[0]

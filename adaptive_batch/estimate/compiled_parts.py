"""Compiled parts of a model on fake tensors: an upper bound of the memory under ``torch.compile``.

A part goes through Dynamo and AOTAutograd as for Inductor, with its decompositions, its passes over
the joint graph of forward and backward, and its partitioner, which chooses the saved activations.
No kernels are generated. A graph allocates by these rules:

* An operator without a generated kernel (a matrix product, attention, a scatter) writes its results
to memory.
* All other operators are fused. One writes its result to memory if it is a reduction, if the graph
returns the result, or if an operator of the first kind reads it. Otherwise the kernels that read
the result compute it.
* No buffer is reused.

Inductor also fuses kernels with each other, which keeps their inputs longer, and orders them
differently, so `MARGIN` is added to the peak. ``adaptive-batch emulate`` measures the exact peak.
"""

from __future__ import annotations

import operator
import os
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

# Margin above the counted peak. Without it, the worst model was 0.3% too low in allocated and 5.2%
# in reserved memory (benchmarks/cuda_stack.py --recount --only compiled).
MARGIN = 0.06

_REDUCTIONS = {
    *("sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "argmax"),
    *("argmin", "var", "var_mean", "cumsum", "linalg_vector_norm"),
    "prepare_softmax_online",
}
# Pointwise operators without PyTorch's tag.
_POINTWISE = {
    *("clone", "cat", "full", "full_like", "empty", "arange", "copy", "index", "gather"),
    *("embedding", "constant_pad_nd", "flip", "repeat", "select_scatter", "slice_scatter"),
    *("scalar_tensor", "triu", "tril", "convert_element_type", "iota", "fma"),
    *("inductor_seeds", "inductor_lookup_seed", "inductor_random"),
}
_CUDA_GRAPHS = (
    "the private memory pools of CUDA graphs are not simulated; compile without"
    ' mode="reduce-overhead", "max-autotune" (estimate it as "max-autotune-no-cudagraphs"),'
    " TORCHINDUCTOR_CUDAGRAPHS=1 and TORCH_COMPILE_BACKEND=cudagraphs, or run adaptive-batch"
    " emulate"
)


def check_compiler() -> str | None:
    """Return why torchtune's compiled parts cannot be estimated, or None.

    Raises:
        SettingError: Inductor records CUDA graphs.
    """
    # The variable that torchtune reads.
    backend = os.environ.get("TORCH_COMPILE_BACKEND", "inductor")
    config: Any = torch.compile(nn.Identity())
    if config.get_compiler_config()["triton.cudagraphs"] or backend == "cudagraphs":
        raise SettingError("compile", True, _CUDA_GRAPHS)
    return None if backend == "inductor" else f"TORCH_COMPILE_BACKEND={backend} is not inductor"


class CompiledParts:
    """Compiles functions for a fake device.

    Args:
        device: the fake device.

    Attributes:
        left_out: parts that are estimated as the eager program, one sentence each.
    """

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._has_compiled = False
        # Whether modes and replacements are off, which is so while a compiled part runs.
        self._is_bare = False
        self.left_out: list[str] = []

    def take_over_modules(self, model: nn.Module) -> None:
        """Replace the modules of a model that ``Module.compile`` has compiled."""
        for module in model.modules():
            if module._compiled_call_impl is not None:
                vars(module).update(self._replacements(module))

    def _replacements(self, module: nn.Module) -> dict[str, Any]:
        """Return the attributes with which a compiled module or wrapper runs on fake tensors."""
        if _is_wrapper(module):
            original: Any = module._orig_mod
            return {"forward": self.compiled(original, type(original).__name__)}
        # Hooks of the module itself are not compiled.
        forward = self.compiled(module.forward, type(module).__name__)
        return {"forward": forward, "_compiled_call_impl": module._call_impl}

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Context manager: replace the compiled modules of a model by versions whose memory can be
        estimated.

        Unsupported parts are estimated as the eager program and named in `left_out`.

        Raises:
            SettingError: a module records CUDA graphs.
        """
        with ExitStack() as contexts:
            # Without duplicates: a shared module is replaced once.
            for module in list(dict.fromkeys(_compiled_modules(model))):
                if self._keep_or_leave_out(module):
                    contexts.enter_context(replaced(module, **self._replacements(module)))
            for module in model.modules():
                forward = vars(module).get("forward")
                if hasattr(forward, "_torchdynamo_orig_callable") and not _is_wrapper(module):
                    reason = "its forward is compiled, not the module; give module.compile()"
                    self._leave_out(type(module).__name__, reason)
            if self._has_compiled:
                # The traced sizes would count towards the recompilation limit of training.
                contexts.callback(torch.compiler.reset)
            yield

    def _keep_or_leave_out(self, module: nn.Module) -> bool:
        """Return whether a compiled module can be estimated; if not, name it in `left_out`."""
        name = type(module).__name__
        compiled: Any = module._compiled_call_impl
        if _is_wrapper(module):
            name = type(module._orig_mod).__name__
            compiled = module
        # Without it, the compiler was disabled, so the module runs eagerly.
        get_config = getattr(compiled, "get_compiler_config", None)
        if get_config is None:
            return False
        config = get_config()
        if config is None:
            self._leave_out(name, "its backend is not inductor")
            return False
        if config["triton.cudagraphs"]:
            raise SettingError("model", f"{name} compiled with CUDA graphs", _CUDA_GRAPHS)
        return True

    def take_over_attributes(self, loss: Any) -> None:
        """Replace the compiled functions and modules of a loss."""
        if not isinstance(loss, nn.Module):
            return
        for name, function in vars(loss).items():
            original = getattr(function, "_torchdynamo_orig_callable", None)
            if original is not None:
                setattr(loss, name, self.compiled(original, f"{type(loss).__name__}.{name}"))
        for name, module in list(loss.named_children()):
            if _is_wrapper(module):
                part: Any = module._orig_mod
                part.forward = self.compiled(part.forward, f"{type(loss).__name__}.{name}")
                setattr(loss, name, part)

    def compiled(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a function that allocates the memory of the compiled function.

        Args:
            function: function to compile.
            name: name for messages.
        """
        exceptions = private("torch._dynamo.exc", "TorchDynamoException")
        # Each number and length of rows is a separate graph, as at the start of a run.
        compiled_function = torch.compile(
            function, backend=self._backend, dynamic=False, fullgraph=True
        )
        self._has_compiled = True
        is_eager = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_eager
            if is_eager:
                return function(*args, **kwargs)
            try:
                with self._bare():
                    return compiled_function(*args, **kwargs)
            except exceptions.TorchDynamoException as error:
                # Dynamo wraps the error of a backend.
                inner = getattr(error, "inner_exception", error)
                reason = f"{type(inner).__name__}: {str(inner).strip().splitlines()[0]}"
                self._leave_out(name, f"it is not one graph ({reason})")
            # The function cannot be compiled, so it runs eagerly from now on.
            is_eager = True
            return function(*args, **kwargs)

        return call

    def _leave_out(self, name: str, reason: str) -> None:
        sentence = f"{name} is compiled, but estimated as the eager program: {reason}"
        if sentence not in self.left_out:
            self.left_out.append(sentence)

    @contextmanager
    def _bare(self) -> Iterator[None]:
        """Remove modes and replaced functions, which Dynamo would refuse or trace."""
        # Each traced size recompiles.
        limits = {"recompile_limit": 2**20, "accumulated_recompile_limit": 2**20}
        config: Any = torch.compiler.config
        with (
            replaced(self, _is_bare=True),
            private.no_torch_functions(),
            real_functions(),
            private.disable_current_modes(),
            torch.compiler.set_stance("default"),
            config.patch(limits),
            self._device.mode,
        ):
            yield

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph of Dynamo like Inductor, but without generating kernels."""
        # Slow to import.
        from functorch.compile import (  # type: ignore[import-untyped]
            aot_module_simplified,
        )

        inductor = private("torch._inductor.compile_fx", "select_decomp_table")
        kernels = self._device.kernels
        if kernels:
            # modules() has the graph itself and the nested graphs of checkpointed regions.
            for part in graph.modules():
                if isinstance(part, fx.GraphModule):
                    _give_attention(part, kernels)
        compiled: Callable[..., Any] = aot_module_simplified(
            graph,
            inputs,
            fw_compiler=self._compile_graph,
            bw_compiler=self._compile_graph,
            partition_fn=_partitioned,
            decompositions=inductor.select_decomp_table(),
        )
        return compiled

    def _compile_graph(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """Return a function that allocates the memory of the compiled graph."""
        _check_operators(graph.graph)
        compiled = CompiledGraph(graph)
        self._device.margin = MARGIN

        def call(args: list[Any]) -> list[Any]:
            # _bare() has removed the counter; in backward, outside of it, the counter is active.
            with self._device.active_counter() if self._is_bare else nullcontext():
                results: list[Any] = compiled.boxed_run(args)
                # Otherwise the environment would keep the results alive.
                compiled.env.clear()
                return results

        # The function then gets its arguments in one list and can free them early.
        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _partitioned(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Partition a joint graph of forward and backward like Inductor."""
    # Check now, since the backward could not fall back to the eager program.
    _check_operators(joint.graph)
    inductor = private("torch._inductor.compile_fx", "partition_fn")
    virtualized = private("torch._inductor.virtualized", "V")
    # Passes that replace random numbers create fake tensors, which need the mode of the graph.
    first_argument, *_ = joint.graph.nodes
    with virtualized.V.set_fake_mode(first_argument.meta["val"].fake_mode):
        return inductor.partition_fn(joint, *args, **kwargs)


def _check_operators(graph: fx.Graph) -> None:
    """Raise an error for higher-order operators, such as wrappers of operators that mutate
    arguments.
    """
    # Plain operators; and builtin functions such as operator.getitem, which allocate nothing.
    known = private.OpOverload, BuiltinFunctionType
    for node in graph.nodes:
        if node.op == "call_function" and not isinstance(node.target, known):
            # The first argument of a wrapper is the operator that it wraps.
            wrapper_and_operator = " of ".join(map(str, (node.target, *node.args[:1])))
            raise NotImplementedError(f"the memory of {wrapper_and_operator} is unknown")


def _give_attention(graph: fx.GraphModule, kernels: CudaKernels) -> None:
    """Replace attention in a graph by that of CUDA."""
    for node in graph.graph.nodes:
        if node.target is nn.functional.scaled_dot_product_attention:
            node.target = kernels.attention
        elif node.target is torch.ops.adaptive_batch.packed_attention.default:
            # Query, key and value: [tokens, heads, head_dim] becomes [1, heads, tokens, head_dim].
            tensors = [operand.meta["example_value"] for operand in node.all_input_nodes[:3]]
            if not kernels.takes_packed_rows(*(tensor.transpose(0, 1)[None] for tensor in tensors)):
                # On the device, this attention breaks the graph.
                raise NotImplementedError("the attention of packed rows runs once for each row")
    graph.recompile()


def _compiled_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost compiled modules in a module."""
    if _is_wrapper(module) or module._compiled_call_impl is not None:
        yield module
        return
    for child in module.children():
        yield from _compiled_modules(child)


def _is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is a wrapper of ``torch.compile``, not one that forwards attributes
    to it.
    """
    return "_orig_mod" in dict(module.named_children())


class CompiledGraph(fx.Interpreter):
    """Runs a graph of operators with at least the memory of its compiled form.

    Args:
        module: graph of ATen operators with fake tensors in ``meta["val"]``.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._kernels = _fuse(module.graph)
        super().__init__(module)

    def run_node(self, n: fx.Node) -> Any:
        """Allocate the results of a generated kernel; run any other node."""
        # Constants (get_attr) are part of the code of kernels, so they need no real values.
        if n in self._kernels or n.op == "get_attr":
            return private.tree_map_only(torch.Tensor, _empty_like, n.meta["val"])
        result = super().run_node(n)
        if _is_view(n) and isinstance(result, torch.Tensor):
            # Autograd sees no views in results of Inductor's code, and hooks of FSDP warn of views.
            return result.data
        return result


def _empty_like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _fuse(graph: fx.Graph) -> set[fx.Node]:
    """Remove operators whose results are not written to memory; their readers read their operands.

    Returns:
        The remaining fused operators, one for each kernel.
    """
    # Nodes whose results are written to memory.
    written: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        has_no_kernel = not _is_fused(node) and not _is_view(node)
        # An operator without a generated kernel reads memory; a kernel can compute what it reads.
        is_read_in_memory = any(user in written and not _is_fused(user) for user in node.users)
        if has_no_kernel or is_read_in_memory or _name(node) in _REDUCTIONS:
            written.add(node)
    kernels: set[fx.Node] = set()
    # Written nodes that a reader of each node reads. A dict is an ordered set here, so that equal
    # graphs allocate equally.
    memory_of: dict[fx.Node, dict[fx.Node, None]] = {}
    for node in graph.nodes:
        reads: dict[fx.Node, None] = {}
        for operand in node.all_input_nodes:
            reads.update(memory_of[operand])
        memory_of[node] = {node: None} if node in written else reads
        if node in written and _is_fused(node):
            kernels.add(node)
            node.args = (list(reads),)
            node.kwargs = {}
    # In reverse, since a node can be erased only after its readers.
    for node in reversed(graph.nodes):
        if node not in written:
            graph.erase_node(node)
    return kernels


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        # An item of a list of views, such as that of split().
        return _is_view(node.all_input_nodes[0])
    return _name(node) == "_unsafe_view" or bool(getattr(node.target, "is_view", False))


def _is_fused(node: fx.Node) -> bool:
    """Return whether Inductor generates a kernel for a node."""
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return is_pointwise or _name(node) in _POINTWISE | _REDUCTIONS


def _name(node: fx.Node) -> str:
    """Return the name of an operator without namespace and overload."""
    if not isinstance(node.target, private.OpOverload):
        return ""
    return str(node.target.name()).partition("::")[2].partition(".")[0]

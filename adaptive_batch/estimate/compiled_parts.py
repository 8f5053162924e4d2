"""Compiled parts of a model on fake tensors: the memory that ``torch.compile`` with Inductor needs.

Such a part goes through Dynamo and AOTAutograd as it does for Inductor: with Inductor's
decompositions, its passes over the joint graph of forward and backward, and the partitioner that
decides what forward saves. No kernel is generated or called. Instead, a call of a graph allocates
what Inductor's would, by one rule, which is the same on every build of PyTorch:

* An operator that Inductor generates no kernel for (a matrix product, attention, a scatter) writes
  its results to memory.
* All others are fused. One writes its result to memory where the graph returns it, where an
  operator of the first kind reads it, where it is a reduction, or where several read it and it
  reads much itself. Otherwise the kernels that need its result compute it.
* Fused kernels that read the same memory in loops of one size are one, which runs as soon as all
  that they read is there. Sums over rows, as for the gradient of a norm's weight, are first of all
  fused with each other; what they need runs before what else runs after the first of them.
* Memory is freed after its last reader. A kernel writes a result in the place of what it reads for
  that result alone and for the last time, if that has the same dtype and size, and is no argument
  of the caller.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.nn.modules import module as module_hooks

from adaptive_batch._torch import (
    OpOverload,
    disable_current_modes,
    num_torch_function_modes,
    pop_torch_function_mode,
    private,
    push_torch_function_mode,
)
from adaptive_batch.errors import SettingError

if TYPE_CHECKING:
    from .cuda_workspace import CudaKernels
    from .fake_step import FakeDevice

aten = torch.ops.aten

# torch/_inductor/config.py: realize_reads_threshold, realize_acc_reads_threshold. A value that
# several read is written to memory above the first, any value above the second.
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


# Versions of torch whose compiled steps the rule was held against.
_HELD_AGAINST = ("2.13.",)


def uses_cuda_graphs() -> bool:
    """Return whether Inductor is set to record CUDA graphs, as ``mode="reduce-overhead"`` does."""
    config = private("torch._inductor.config", "triton")
    return bool(config.triton.cudagraphs) or _backend_name() == "cudagraphs"


def not_estimated() -> str | None:
    """Return why what torchtune compiles cannot be estimated; None where it can."""
    if not torch.__version__.startswith(_HELD_AGAINST):
        return f"what torch {torch.__version__} compiles was not held against PyTorch's CUDA build"
    if _backend_name() != "inductor":
        return f"TORCH_COMPILE_BACKEND={_backend_name()} is not inductor"
    return None


def _not_estimated_of(compiled: Any, name: str) -> str | None:
    """Return why a function that a script has compiled cannot be estimated; None where it can.

    Args:
        compiled: what ``torch.compile`` has returned.
        name: of what was compiled.

    Raises:
        SettingError: it records CUDA graphs.
    """
    if not torch.__version__.startswith(_HELD_AGAINST):
        return not_estimated()
    # Of Inductor alone.
    config = compiled.get_compiler_config()
    if config is None:
        return "its backend is not inductor"
    if config["triton.cudagraphs"]:
        remedy = (
            "CUDA graphs keep memory in pools of their own, which are not simulated; compile"
            ' without mode="reduce-overhead" and without options={"triton.cudagraphs": True}, or'
            ' estimate mode="max-autotune" as "max-autotune-no-cudagraphs"'
        )
        raise SettingError("model", f"{name} compiled with CUDA graphs", remedy)
    return None


def _backend_name() -> str:
    # torchtune's variable.
    return os.environ.get("TORCH_COMPILE_BACKEND", "inductor")


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
        self.left_out: list[str] = []

    def take_over_modules(self, model: nn.Module) -> None:
        """Replace what ``Module.compile`` has compiled in a model."""
        for module in model.modules():
            if module._compiled_call_impl is not None:
                self._take_over(module)

    def _take_over(self, module: nn.Module) -> None:
        """Replace what a compiled module runs, or the wrapper that ``torch.compile`` returned."""
        if _is_wrapper(module):
            original: Any = module._orig_mod
            module.forward = self.compiled(original, type(original).__name__)
            return
        # Hooks of the module itself stay outside.
        module.forward = self.compiled(module.forward, type(module).__name__)
        module._compiled_call_impl = module._call_impl

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Inside, what a script has compiled in a model allocates what the compiled one would; of
        what cannot be estimated so the eager program is counted, which `left_out` says.

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
                if getattr(compiled, "get_compiler_config", None) is None:
                    # The compiler is switched off.
                    continue
                reason = _not_estimated_of(compiled, name)
                if reason is not None:
                    self._say(
                        f"compile: {name} is counted as the eager program, which holds more as a"
                        f" rule: {reason}"
                    )
                    continue
                restored.callback(_restorer(module))
                self._take_over(module)
            for module in model.modules():
                forward = vars(module).get("forward")
                if hasattr(forward, "_torchdynamo_orig_callable") and not _is_wrapper(module):
                    self._say(
                        f"compile: {type(module).__name__} is counted as the eager program, which"
                        " holds more as a rule: its forward is compiled, and not the module; give"
                        " module.compile()"
                    )
            if self._made:
                # Of the hooks that name modules for the estimate.
                restored.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)`")
                # Each size that was tried is a variant of the same code, of which training may have
                # a few before it goes on without the compiler.
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
                    self._leave_out(name, error)
            return function(*args, **kwargs)

        self._made.append(call)
        return call

    def _leave_out(self, name: str, error: Exception) -> None:
        # A backend's error comes within one that names the backend.
        error = getattr(error, "inner_exception", error)
        reason = str(error).strip().partition("\n")[0]
        self._say(
            f"compile: {name} is counted as the eager program, which holds more as a rule: it could"
            f" not be compiled as one graph ({type(error).__name__}: {reason})"
        )

    def _say(self, sentence: str) -> None:
        if sentence not in self.left_out:
            self.left_out.append(sentence)

    @contextmanager
    def _bare(self) -> Iterator[None]:
        """Inside, no mode and no hook is on that Dynamo would refuse, or make part of a graph."""
        with ExitStack() as contexts:
            contexts.enter_context(_no_function_modes())
            contexts.enter_context(_no_hooks_of_all_modules())
            contexts.enter_context(disable_current_modes())
            contexts.enter_context(torch.compiler.set_stance("default"))
            limits = {"recompile_limit": 2**20, "accumulated_recompile_limit": 2**20}
            config = private("torch._dynamo.config", "patch", *limits)
            contexts.enter_context(config.patch(limits))
            contexts.enter_context(self._device.mode)
            yield

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        backends = private("torch._dynamo.backends.common", "aot_autograd")
        inductor = private("torch._inductor.compile_fx", "partition_fn", "select_decomp_table")
        kernels = self._device.kernels
        if kernels:
            for node in graph.graph.nodes:
                if node.target is nn.functional.scaled_dot_product_attention:
                    node.target = kernels.attention_operator
                elif node.target is torch.ops.adaptive_batch.packed_attention.default:
                    _check_packed_rows(node, kernels)
            graph.recompile()
        compile_graph = backends.aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=self._backward,
            partition_fn=inductor.partition_fn,
            decompositions=inductor.select_decomp_table(),
        )
        compiled: Callable[..., Any] = compile_graph(graph, inputs)
        return compiled

    def _forward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._call(GraphMemory(graph.graph, is_backward=False))

    def _backward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._call(GraphMemory(graph.graph, is_backward=True))

    def _call(self, memory: GraphMemory) -> Callable[..., Any]:
        def call(args: list[Any]) -> list[Any]:
            with self._device.counted():
                return memory.allocate(args)

        # Arguments are freed inside.
        call._boxed_call = True  # type: ignore[attr-defined]
        return call


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


def _restorer(module: nn.Module) -> Callable[[], None]:
    """Return a function that leaves what a call of a module runs as it is now."""
    forward = vars(module).get("forward")
    compiled_call = module._compiled_call_impl

    def restore() -> None:
        if forward is None:
            del module.forward
        else:
            module.forward = forward
        module._compiled_call_impl = compiled_call

    return restore


class GraphMemory:
    """What a graph of operators allocates and frees when Inductor has compiled it.

    Args:
        graph: of ATen's operators, with fake tensors as ``meta["val"]``.
        is_backward: whether what forward has saved is among its arguments.
    """

    def __init__(self, graph: fx.Graph, *, is_backward: bool) -> None:
        *self._nodes, self._output = graph.nodes
        self._arguments = [node for node in self._nodes if node.op == "placeholder"]
        # What forward made for backward alone can be written over.
        self._donated = {
            node
            for node in self._arguments
            if is_backward and not node.name.startswith(("primals", "tangents"))
        }
        # The node whose memory a node's result lies in.
        self._roots: dict[fx.Node, fx.Node] = {}
        self._readers: dict[fx.Node, set[fx.Node]] = {}
        for node in graph.nodes:
            operands = [self._roots[operand] for operand in node.all_input_nodes]
            if _is_view(node) or _is_copy_to_argument(node):
                self._roots[node] = operands[0]
            else:
                self._roots[node] = node
            if not _is_view(node):
                for operand in operands:
                    self._readers.setdefault(operand, set()).add(node)
        # What each node reads from memory, and the nodes that write to it.
        self._reads: dict[fx.Node, set[fx.Node]] = {}
        self._written = set(self._arguments)
        for node in graph.nodes:
            self._reads[node] = self._memory_read_by(node)
            if self._roots[node] is node and self._is_written(node):
                self._written.add(node)
        self._kernels: list[fx.Node] = []
        # The nodes that run in one kernel with a node, in their order.
        self._joined: dict[fx.Node, list[fx.Node]] = {}
        for node in self._nodes:
            if self._is_kernel(node):
                self._schedule(node)
        self._returned = {self._roots[node] for node in self._output.all_input_nodes}
        last_readers: dict[fx.Node, fx.Node | None] = dict.fromkeys(self._written)
        for node in self._kernels:
            last_readers.update(dict.fromkeys(self._reads[node], self._joined[node][-1]))
        self._freed_after: dict[fx.Node | None, list[fx.Node]] = {}
        for node, reader in last_readers.items():
            if node not in self._returned:
                # What nobody reads is freed at once.
                maker = node if node.op != "placeholder" else None
                self._freed_after.setdefault(reader or maker, []).append(node)

    def _memory_read_by(self, node: fx.Node) -> set[fx.Node]:
        reads: set[fx.Node] = set()
        for operand in node.all_input_nodes:
            root = self._roots[operand]
            reads |= {root} if root in self._written else self._reads[root]
        return reads

    def _is_kernel(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node.target is operator.getitem or _is_view(node):
            return False
        return node in self._written or _has_several_results(node) or _is_copy_to_argument(node)

    def _schedule(self, node: fx.Node) -> None:
        """Add a node to the kernels: last, or, where it is fused, to the first that reads the same
        memory in a loop of the same size, if what it reads is there by then.
        """
        reads = self._reads[node]
        joined = self._sums_over_rows_with(node)
        for kernel in reversed(self._kernels if _is_fused(node) and not joined else []):
            is_alike = _is_fused(kernel) and _loop_size(kernel) == _loop_size(node)
            if is_alike and reads & {kernel, *self._reads[kernel]}:
                joined = self._joined[kernel]
            if kernel in reads or any(user in reads for user in kernel.users):
                break
        if not joined and _is_fused(node):
            joined = self._delayed_for(node)
        place = len(self._kernels)
        if joined:
            place = self._kernels.index(joined[-1]) + 1
        self._kernels.insert(place, node)
        joined.append(node)
        self._joined[node] = joined

    def _delayed_for(self, node: fx.Node) -> list[fx.Node]:
        """Delay the last kernel that reads the same memory in a loop of the same size until what a
        node reads is there, with all that needs its results; return it, to be fused with the node.

        Returns none where each such kernel is needed for a part of what the node reads.
        """
        reads = self._reads[node]
        needed = self._needed_for(reads, self._joined)
        for kernel in reversed(self._kernels):
            joined = self._joined[kernel]
            is_alike = _is_fused(kernel) and _loop_size(kernel) == _loop_size(node)
            if is_alike and joined[0] not in needed and reads & self._reads[kernel]:
                self._delay(joined)
                return joined
        return []

    def _sums_over_rows_with(self, node: fx.Node) -> list[fx.Node]:
        """Take the last sums over rows that read what a sum over rows reads out of their kernel,
        and run all that the node needs before them; return them, to be fused with it.

        Returns none, and leaves kernels as they are, where there are none, the node needs one of
        them, or they cannot run apart from what else is in their kernel.
        """
        if not _is_over_rows(node):
            return []
        size = _loop_size(node)
        for kernel in reversed(self._kernels):
            shared = self._reads[node] & self._reads[kernel]
            is_alike = _is_over_rows(kernel) and _loop_size(kernel) == size
            if not is_alike or size not in map(_num_elements, shared):
                continue
            kernel_nodes = self._joined[kernel]
            sums = [other for other in kernel_nodes if _is_over_rows(other)]
            rest = [other for other in kernel_nodes if other not in sums]
            joined = {**self._joined, **dict.fromkeys(sums, sums), **dict.fromkeys(rest, rest)}
            reads = self._reads[node]
            needed = self._needed_for(reads, joined)
            needed.update(joined[maker][0] for maker in self._makers(reads))
            rest_reads_sums = self._read_results(rest, sums)
            sums_read_rest = self._read_results(sums, rest)
            if sums[0] in needed or (rest_reads_sums and sums_read_rest):
                return []
            # The rest stays one kernel, on the side of the sums where it began if it can be there.
            if rest and (sums_read_rest or (kernel_nodes[0] is rest[0] and not rest_reads_sums)):
                needed.add(rest[0])
            place = self._kernels.index(kernel_nodes[0])
            later = [other for other in self._kernels[place:] if other not in sums]
            sooner = [other for other in later if joined[other][0] in needed]
            others = [other for other in later if joined[other][0] not in needed]
            self._kernels[place:] = [*sooner, *sums, *others]
            self._joined = joined
            return sums
        return []

    def _read_results(self, readers: Iterable[fx.Node], makers: Iterable[fx.Node]) -> bool:
        """Return whether nodes read what others write to memory."""
        results = _results(makers)
        return any(self._reads[reader] & results for reader in readers)

    def _needed_for(
        self, reads: Iterable[fx.Node], kernels: Mapping[fx.Node, Sequence[fx.Node]]
    ) -> set[fx.Node]:
        """Return the first node of each kernel without which the makers of memory cannot run.

        Args:
            reads: that memory.
            kernels: nodes that run in one kernel with a node.
        """
        needed: set[fx.Node] = set()
        makers = self._makers(reads)
        while makers:
            joined = kernels[makers.pop()]
            for node in joined:
                for maker in self._makers(self._reads[node]):
                    first = kernels[maker][0]
                    if first is not joined[0] and first not in needed:
                        needed.add(first)
                        makers.append(first)
        return needed

    def _makers(self, reads: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the nodes of kernels that have written memory; arguments have none."""
        makers = []
        for memory in reads:
            # One of several results is an item of theirs.
            maker = memory if memory in self._joined else next(iter(memory.all_input_nodes), None)
            if maker in self._joined:
                makers.append(maker)
        return makers

    def _delay(self, joined: Sequence[fx.Node]) -> None:
        """Move a kernel to the end, and after it whatever needs its results."""
        made = _results(joined)
        moved = dict.fromkeys(joined)
        for kernel in self._kernels:
            together = self._joined[kernel]
            if kernel not in moved and any(self._reads[node] & made for node in together):
                moved.update(dict.fromkeys(together))
                made |= _results(together)
        stay = [kernel for kernel in self._kernels if kernel not in moved]
        self._kernels = [*stay, *moved]

    def _is_written(self, node: fx.Node) -> bool:
        if node.op != "call_function" or _has_several_results(node):
            return False
        if not _is_fused(node) or _is_reduction(node):
            return True
        readers = self._readers.get(node, set())
        if any(not _is_fused(reader) for reader in readers):
            return True
        num_reads = len(self._reads[node])
        return num_reads > _MOST_READS or (len(readers) > 1 and num_reads > _MANY_READS)

    def allocate(self, args: list[Any]) -> list[Any]:
        """Allocate and free what a call does, and return its results.

        Args:
            args: of the graph; the list is emptied.
        """
        memory: dict[fx.Node, Any] = dict(zip(self._arguments, args, strict=True))
        args.clear()
        for node in self._freed_after.get(None, ()):
            del memory[node]
        for node in self._kernels:
            freed = self._freed_after.get(node, [])
            if _is_fused(node):
                self._write(node, memory)
            elif not _is_copy_to_argument(node):
                self._run(node, memory)
            for operand in freed:
                memory.pop(operand, None)
        results = self._output.args[0]
        assert isinstance(results, list | tuple)
        return [self._tensor(result, memory) for result in results]

    def _write(self, node: fx.Node, memory: dict[fx.Node, Any]) -> None:
        """Give a fused result memory: new, or of what it alone reads, for the last time."""
        value = node.meta["val"]
        if _has_several_results(node):
            for result in node.users:
                memory[result] = _empty_like(result.meta["val"])
            return
        joined = self._joined[node]
        for operand in self._freed_after.get(joined[-1], ()):
            is_own = operand.op != "placeholder" or operand in self._donated
            # What reads this result in the same kernel computes it again, from the same operands.
            readers = [
                kernel
                for kernel in joined
                if operand in self._reads[kernel]
                or (node in self._reads[kernel] and not _is_reduction(kernel))
            ]
            is_there = operand in memory and readers == [node]
            if is_own and is_there and _takes_the_place(value, memory[operand]):
                memory[node] = memory.pop(operand)
                return
        memory[node] = _empty_like(value)

    def _run(self, node: fx.Node, memory: dict[fx.Node, Any]) -> None:
        """Run an operator that is not fused, so that what it needs is counted as elsewhere."""
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda operand: self._tensor(operand, memory)
        )
        assert callable(node.target)
        results = node.target(*args, **kwargs)
        if not _has_several_results(node):
            memory[node] = results
            return
        for result in node.users:
            memory[result] = results[result.args[1]]

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
        return tensor.as_strided(value.shape, value.stride(), value.storage_offset())


def _empty_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _results(kernels: Iterable[fx.Node]) -> set[fx.Node]:
    """Return what kernels write to memory."""
    results = set(kernels)
    for kernel in kernels:
        if _has_several_results(kernel):
            results.update(kernel.users)
    return results


def _has_several_results(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _is_copy_to_argument(node: fx.Node) -> bool:
    return node.target is aten.copy_.default


def _takes_the_place(value: torch.Tensor, operand: Any) -> bool:
    return (
        isinstance(operand, torch.Tensor)
        and operand.dtype == value.dtype
        and operand.numel() == value.numel()
    )


def _loop_size(node: fx.Node) -> int:
    """Return how many elements a fused kernel computes or, in a reduction, reads."""
    return _num_elements(node.all_input_nodes[0] if _is_reduction(node) else node)


def _num_elements(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        # A part of what is divided, as by split.
        return _is_view(node.all_input_nodes[0])
    if not isinstance(node.target, OpOverload):
        return False
    return _name(node) == "_unsafe_view" or any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in node.target._schema.arguments
    )


def _is_reduction(node: fx.Node) -> bool:
    return _name(node) in _REDUCTIONS


def _is_over_rows(node: fx.Node) -> bool:
    """Return whether a node is a sum over all dimensions but the last."""
    if _name(node) != "sum" or len(node.args) < 2:
        return False
    num_dimensions = node.all_input_nodes[0].meta["val"].dim()
    dimensions = node.args[1]
    # Without dimensions all are summed.
    if not dimensions or not num_dimensions:
        return False
    assert isinstance(dimensions, Sequence)
    return {dimension % num_dimensions for dimension in dimensions} == {*range(num_dimensions - 1)}


def _is_fused(node: fx.Node) -> bool:
    """Return whether Inductor generates the kernel of a node."""
    if not isinstance(node.target, OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or _name(node) in _POINTWISE | _REDUCTIONS


def _name(node: fx.Node) -> str:
    """Return an operator's name, without its namespace and overload."""
    if not isinstance(node.target, OpOverload):
        return ""
    return node.target._schema.name.partition("::")[2]


@contextmanager
def _no_function_modes() -> Iterator[None]:
    modes = []
    while num_torch_function_modes():
        modes.append(pop_torch_function_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            push_torch_function_mode(mode)


@contextmanager
def _no_hooks_of_all_modules() -> Iterator[None]:
    tables: tuple[dict[int, Any], ...] = (
        module_hooks._global_forward_pre_hooks,
        module_hooks._global_forward_hooks,
        module_hooks._global_forward_hooks_always_called,
    )
    hooks = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, own in zip(tables, hooks, strict=True):
            table.update(own)

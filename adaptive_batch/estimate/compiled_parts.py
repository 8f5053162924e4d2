"""Compiled parts of a model on fake tensors: the memory that ``torch.compile`` with Inductor needs.

Such a part goes through Dynamo and AOTAutograd as it does for Inductor: with Inductor's
decompositions, its passes over the joint graph of forward and backward, and the partitioner that
decides what forward saves. No kernel is generated or called. Instead, a call of a graph allocates
what Inductor's would, by one rule, the same on every build of the versions in `_HELD_AGAINST`:

* An operator that Inductor generates no kernel for (a matrix product, attention, a scatter) writes
  its results to memory.
* All others are fused. One writes its result to memory where the graph returns it, where an
  operator of the first kind reads it, where it is a reduction of 8 values or more, or where several
  read it and it reads much itself. Otherwise the kernels that need its result compute it, and so
  do those that stand before the first operator that needs it in memory.
* Generated kernels that share memory are fused, as `fused_kernels` says. What only the operators of
  one kernel need is not in memory.
* Kernels run in the order with the lowest peak of several, as `kernel_order` says.
* Memory is freed after its last reader. A kernel writes a result in the place of what it reads for
  that result alone, in the same order and for the last time, if that has the same dtype and size,
  and is no argument of the caller; else over memory that was freed before, as `memory_reuse` says.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.nn.modules import module as module_hooks

from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import replaced
from adaptive_batch.errors import SettingError

from .fused_kernels import (
    Access,
    Kernel,
    Operation,
    fused_kernels,
    num_bytes_of,
    num_operations_of,
    size_of,
)
from .kernel_order import KernelOrders
from .memory_reuse import MemoryReuse

private = PrivateNames("memory estimates")

if TYPE_CHECKING:
    from .cuda_workspace import CudaKernels
    from .fake_step import FakeDevice

aten = torch.ops.aten

# torch/_inductor/config.py: realize_reads_threshold, realize_acc_reads_threshold. A value that
# several read is written to memory above the first, any value above the second.
_MANY_READS = 4
_MOST_READS = 8
# Summands of a reduction that Inductor generates without a loop, as any other operator:
# unroll_reductions_threshold.
_FEW_SUMMANDS = range(1, 8)
# It has as many results as it reads values, however many it sums.
_SCAN = "cumsum"

_REDUCTIONS = {
    *("sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "argmax"),
    *("argmin", "var", "var_mean", _SCAN, "linalg_vector_norm"),
    "prepare_softmax_online",
}
# Those that PyTorch does not tag as pointwise.
_POINTWISE = {
    *("clone", "cat", "full", "full_like", "empty", "arange", "copy", "index", "gather"),
    *("embedding", "constant_pad_nd", "flip", "repeat", "select_scatter", "slice_scatter"),
    *("scalar_tensor", "triu", "tril", "convert_element_type", "iota", "fma"),
    *("inductor_seeds", "inductor_lookup_seed", "inductor_random"),
}
# All of a tensor, row by row.
_WHOLE = ()
# Operators that Inductor gives the memory of their results, and what writes there.
_PRODUCTS: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.addmm.default: aten.addmm.out,
    aten.bmm.default: aten.bmm.out,
    aten.baddbmm.default: aten.baddbmm.out,
}
# Operators that read a tensor of the host, which Inductor takes for unaligned, and their results.
_UNALIGNED = (
    torch.ops.adaptive_batch.packed_attention.default,
    torch.ops.adaptive_batch.packed_attention_backward.default,
)


# Versions of torch whose compiled steps the rule was held against.
_HELD_AGAINST = ("2.11.", "2.12.", "2.13.", "2.14.")


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
                restored.enter_context(replaced(module, **self._taken_over(module)))
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
            fw_compiler=self._forward,
            bw_compiler=self._backward,
            partition_fn=_partitioned,
            decompositions=inductor.select_decomp_table(),
        )
        compiled: Callable[..., Any] = compile_graph(graph, inputs)
        return compiled

    def _forward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _check_operators(graph.graph)
        return self._call(GraphMemory(graph.graph))

    def _backward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        guards = private("torch._guards", "TracingContext")
        donated = guards.TracingContext.get().fw_metadata.bw_donated_idxs
        return self._call(GraphMemory(graph.graph, donated or ()))

    def _call(self, memory: GraphMemory) -> Callable[..., Any]:
        def call(args: list[Any]) -> list[Any]:
            with self._device.counted():
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
        if isinstance(node.target, private.HigherOrderOperator):
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
    """What a graph of operators allocates and frees when Inductor has compiled it.

    Args:
        graph: of ATen's operators, with fake tensors as ``meta["val"]``.
        donated: positions of the arguments that forward has made for this graph alone, and that
            can be written over; None of a forward.
    """

    def __init__(self, graph: fx.Graph, donated: Collection[int] | None = None) -> None:
        *self._nodes, self._output = graph.nodes
        self._arguments = [node for node in self._nodes if node.op == "placeholder"]
        self._donated = {self._arguments[position] for position in donated or ()}
        # What forward has saved, which may be the caller's as well.
        self._saved = {
            node
            for node in self._arguments
            if donated is not None and not node.name.startswith(("primals", "tangents"))
        }
        # The node whose memory a node's result lies in.
        self._roots: dict[fx.Node, fx.Node] = {}
        self._readers: dict[fx.Node, set[fx.Node]] = {}
        for node in graph.nodes:
            operands = [self._roots[operand] for operand in node.all_input_nodes]
            if _is_view(node):
                self._roots[node] = operands[0]
                continue
            self._roots[node] = node
            for operand in operands:
                self._readers.setdefault(operand, set()).add(node)
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        # From which place in the graph on results are in memory, and how each node reads them.
        self._written_at = dict.fromkeys(self._arguments, -1)
        self._reads: dict[fx.Node, dict[fx.Node, dict[object, int]]] = {}
        for node in graph.nodes:
            self._reads[node] = self._memory_read_by(node)
            if self._roots[node] is node and self._is_written(node):
                self._written_at[node] = self._place_of_writing(node)
        self._returned = {self._roots[node] for node in self._output.all_input_nodes}
        self._kernels = self._ordered_kernels()
        # What fused kernels compute that nothing else needs, which is not in memory.
        self._internal = self._internal_results()
        self._freed_after = self._last_read()
        # The memory that results are written over.
        self._taken = self._taken_memory()

    def _memory_read_by(self, node: fx.Node) -> dict[fx.Node, dict[object, int]]:
        """Return the memory that a node reads: in which orders, and how many bytes in each."""
        reads: dict[fx.Node, dict[object, int]] = {}
        for operand in node.all_input_nodes:
            root = self._roots[operand]
            index = _index(operand)
            if self._is_there(root, node):
                reads.setdefault(root, {})[index] = num_bytes_of(operand)
                continue
            # It is computed again.
            for memory, indices in self._reads[root].items():
                for inner, num_bytes in indices.items():
                    within = inner if index == _WHOLE else (inner, index)
                    reads.setdefault(memory, {})[within] = num_bytes
        return reads

    def _is_there(self, root: fx.Node, reader: fx.Node) -> bool:
        """Return whether a result is in memory when a node reads it."""
        return self._written_at.get(root, len(self._places)) <= self._places[reader]

    def _is_kernel(self, node: fx.Node) -> bool:
        if node.op != "call_function" or _is_view(node):
            return False
        if node.target is operator.getitem:
            # One of a fused operator's results is written by its kernel.
            return not _is_fused(node.all_input_nodes[0])
        return node in self._written_at or _has_several_results(node)

    def _ordered_kernels(self) -> Sequence[Kernel]:
        nodes = [node for node in self._nodes if self._is_kernel(node)]
        nodes.sort(key=lambda node: self._written_at.get(node, self._places[node]))
        operations: list[Operation] = []
        num_users = Counter(self._returned)
        numbers: dict[fx.Node, int] = {}
        next_number = 0
        for node in nodes:
            if node.target is operator.getitem:
                source, position = node.args
                assert isinstance(source, fx.Node)
                earlier = source.meta["val"][:position]
                num_before = sum(isinstance(value, torch.Tensor) for value in earlier)
                numbers[node] = numbers[source] + 1 + num_before
            else:
                numbers[node] = next_number
                next_number += num_operations_of(node, is_over_rows=_is_over_rows(node))
            operations.append(self._operation(node, numbers[node]))
            num_users.update(self._reads[node].keys())
        kernels = fused_kernels(operations, num_users)
        return KernelOrders(kernels, self._saved, self._returned).best()

    def _operation(self, node: fx.Node, number: int) -> Operation:
        is_fused = _is_fused(node)
        results = tuple(node.users) if _has_several_results(node) else (node,)
        # What others make has a place of its own in their order, where it is taken from them.
        writes = results if is_fused else (node,)
        is_taken = node.target is operator.getitem
        is_over_rows = _is_over_rows(node)
        accesses = [
            Access(memory, (index, is_over_rows), num_bytes)
            for memory, indices in self._reads[node].items()
            for index, num_bytes in indices.items()
        ]
        accesses += [Access(result, (_WHOLE, False), num_bytes_of(result)) for result in writes]
        num_results = max(1, _num_elements(next(iter(writes), node)))
        num_summands = 1
        if _is_reduction(node):
            num_summands = _num_elements(node.all_input_nodes[0]) // num_results
        return Operation(
            node=node,
            accesses=tuple(accesses),
            writes=writes,
            loop=(num_results, num_summands),
            made_bytes=0 if is_taken else sum(map(num_bytes_of, results)),
            is_fused=is_fused,
            is_reduction=_is_reduction(node),
            is_over_rows=is_over_rows,
            number=number,
        )

    def _internal_results(self) -> set[fx.Node]:
        readers: dict[fx.Node, set[Kernel]] = {}
        for kernel in self._kernels:
            for node in kernel.nodes:
                for memory in self._reads[node]:
                    readers.setdefault(memory, set()).add(kernel)
        return {
            node
            for kernel in self._kernels
            if kernel.is_fused
            for node in kernel.results
            if node not in self._returned and readers.get(node, set()) <= {kernel}
        }

    def _last_read(self) -> dict[Kernel | None, list[fx.Node]]:
        """Return what is freed after each kernel, and before the first one."""
        last_readers: dict[fx.Node, Kernel | None] = dict.fromkeys(self._arguments)
        names = {node: node.name for node in self._arguments}
        for kernel in self._kernels:
            last_readers.update(dict.fromkeys((*kernel.reads, *kernel.results), kernel))
            names.update({node: f"buf{number}" for node, number in kernel.results.items()})
        freed_after: dict[Kernel | None, list[fx.Node]] = {}
        # By the names that Inductor gives memory.
        for memory in sorted(last_readers, key=names.__getitem__):
            if memory not in self._returned:
                freed_after.setdefault(last_readers[memory], []).append(memory)
        return freed_after

    def _taken_memory(self) -> dict[fx.Node, fx.Node]:
        """Return what results are written over, which is freed no more."""
        taken: dict[fx.Node, fx.Node] = {}
        reuse = MemoryReuse(self._kernels, self._freed_after, self._saved)
        unaligned = {
            result for node in self._nodes if node.target in _UNALIGNED for result in node.users
        }
        for kernel in self._kernels:
            freed = self._freed_after.get(kernel, [])
            for node in kernel.nodes:
                if _has_several_results(node) or node in self._internal:
                    continue
                operand = self._written_over(node, kernel) if kernel.is_fused else None
                if operand is not None:
                    freed.remove(operand)
                    taken[node] = operand
                    if operand in unaligned:
                        unaligned.add(node)
                elif kernel.is_fused or node.target in _PRODUCTS:
                    reused = reuse.take(node, kernel)
                    if reused is not None:
                        taken[node], freed_by = reused
                        self._freed_after[freed_by].remove(taken[node])
            for memory in freed:
                is_own = memory.op != "placeholder" and memory not in self._internal
                if is_own and memory not in unaligned:
                    reuse.free(memory, kernel)
        return taken

    def _written_over(self, node: fx.Node, kernel: Kernel) -> fx.Node | None:
        """Return what a fused node reads alone and for the last time, in the order in which it
        writes; None where there is no such memory.
        """
        freed = self._freed_after.get(kernel, ())
        for operand, indices in self._reads[node].items():
            is_own = operand.op != "placeholder" or operand in self._donated
            if operand not in freed or not is_own or operand in self._internal:
                continue
            readers = [other for other in kernel.nodes if operand in self._reads[other]]
            is_alike = [*indices] == [_WHOLE] and size_of(operand) == size_of(node)
            if is_alike and readers == [node]:
                return operand
        return None

    def _is_written(self, node: fx.Node) -> bool:
        if node.op != "call_function" or (_has_several_results(node) and _is_fused(node)):
            return False
        if not _is_fused(node) or _is_reduction(node):
            return True
        readers = self._readers.get(node, set())
        if any(not _is_fused(reader) for reader in readers):
            return True
        return self._reads_much(node)

    def _reads_much(self, node: fx.Node) -> bool:
        num_reads = len(self._reads[node])
        num_readers = len(self._readers.get(node, ()))
        return num_reads > _MOST_READS or (num_readers > 1 and num_reads > _MANY_READS)

    def _place_of_writing(self, node: fx.Node) -> int:
        """Return the place in the graph at which a result is written: where it is computed, or
        where the first operator needs it that Inductor generates no kernel for.
        """
        if not _is_fused(node) or _is_reduction(node) or self._reads_much(node):
            return self._places[node]
        places = []
        views = [node]
        while views:
            view = views.pop()
            for user in view.users:
                if user is self._output:
                    places.append(self._places[view])
                elif _is_view(user):
                    views.append(user)
                elif not _is_fused(user):
                    places.append(self._places[user])
        return min(places)

    def allocate(self, args: list[Any]) -> list[Any]:
        """Allocate and free what a call does, and return its results.

        Args:
            args: of the graph; the list is emptied.
        """
        memory: dict[fx.Node, Any] = dict(zip(self._arguments, args, strict=True))
        args.clear()
        for node in self._freed_after.get(None, ()):
            del memory[node]
        for kernel in self._kernels:
            for node in kernel.nodes:
                if kernel.is_fused:
                    self._write(node, memory)
                else:
                    self._run(node, memory)
            for operand in self._freed_after.get(kernel, ()):
                memory.pop(operand, None)
        results = self._output.args[0]
        assert isinstance(results, list | tuple)
        return [self._tensor(result, memory) for result in results]

    def _write(self, node: fx.Node, memory: dict[fx.Node, Any]) -> None:
        """Give a fused result memory."""
        if _has_several_results(node):
            for result in node.users:
                if result not in self._internal:
                    memory[result] = _empty_like(result.meta["val"])
        elif node in self._taken:
            memory[node] = memory.pop(self._taken[node])
        elif node not in self._internal:
            memory[node] = _empty_like(node.meta["val"])

    def _run(self, node: fx.Node, memory: dict[fx.Node, Any]) -> None:
        """Run an operator that is not fused, so that what it needs is counted as elsewhere."""
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda operand: self._tensor(operand, memory)
        )
        if node in self._taken:
            memory[node] = memory.pop(self._taken[node])
            _PRODUCTS[node.target](*args, **kwargs, out=self._tensor(node, memory))
            return
        assert callable(node.target)
        memory[node] = node.target(*args, **kwargs)

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


def _num_elements(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _index(node: fx.Node) -> object:
    """Return which part of memory a tensor is, in which order of its elements."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return _WHOLE
    dimensions: list[tuple[int, int]] = []
    for size, stride in zip(value.shape, value.stride(), strict=True):
        # Those of one element, and those that are expanded, do not count.
        if size == 1 or not stride:
            continue
        if dimensions and dimensions[-1][1] == size * stride:
            dimensions[-1] = (dimensions[-1][0] * size, stride)
        else:
            dimensions.append((size, stride))
    is_row_by_row = not dimensions or (len(dimensions) == 1 and dimensions[0][1] == 1)
    if is_row_by_row and not value.storage_offset():
        return _WHOLE
    return (tuple(dimensions), value.storage_offset())


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
    name = _name(node)
    if name not in _REDUCTIONS:
        return False
    if _has_several_results(node) or name == _SCAN:
        return True
    num_results = max(1, _num_elements(node))
    return _num_elements(node.all_input_nodes[0]) // num_results not in _FEW_SUMMANDS


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


@contextmanager
def _no_hooks_of_all_modules() -> Iterator[None]:
    tables: tuple[dict[int, Any], ...] = (
        module_hooks._global_forward_pre_hooks,
        module_hooks._global_forward_hooks,
        module_hooks._global_forward_hooks_always_called,
    )
    with ExitStack() as restored:
        for table in tables:
            restored.callback(table.update, dict(table))
            table.clear()
        yield

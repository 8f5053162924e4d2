"""Flatten a nested state into its plain tensors, which any checkpoint format takes, and a small skeleton of all the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# What ``torch.load(weights_only=True)`` reads back as it was.
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


def flatten(tree: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Flatten a nested state into plain tensors and a skeleton.

    Wrapper subclasses, such as torchao's low-bit optimizer states, are divided into the tensors that they wrap; other tensors that
    are not plain (sparse, quantized) stay in the skeleton, as copies on the host. A DTensor stays one tensor, of its global shape,
    and the skeleton is the same whether it is sharded or not. Entries that are the same memory become one tensor.

    Args:
        tree: dicts with str or int keys, lists, tuples, tensors and plain values (bool, int, float, complex, str, None,
            ``torch.dtype``, ``torch.device``, ``torch.Size``), in any nesting. Subclasses of these, such as OrderedDict and
            numpy's float64, are saved as what they derive from.

    Returns:
        The plain tensors and DTensors, detached, not copied, by the path to each (``model.layers.0.weight``), and the skeleton,
        which ``torch.load(weights_only=True)`` reads where it knows the wrapper classes.

    Raises:
        TypeError: something in the tree is none of these; its path is named.
    """
    flattening = _Flattening()
    return flattening.tensors, flattening.node(tree, "")


def unflatten(tensors: Mapping[str, torch.Tensor], skeleton: Any) -> Any:
    """Put together the tree that :func:`flatten` took apart: values bit for bit, keys in order, dense tensors with their strides.

    The tensors are used as they are, not copied, where their strides are right.
    """
    restored: dict[str, torch.Tensor] = {}

    def build(node: list[Any]) -> Any:
        kind, *rest = node
        if kind == "tensor":
            name, stride = rest
            if name not in restored:
                restored[name] = tensors[name] if stride is None else _with_stride(tensors[name], stride)
            return restored[name]
        cls, context, shape, stride, inner = rest
        return cls.__tensor_unflatten__({name: _built(child, build) for name, child in inner}, context, shape, stride)

    return _built(skeleton, build)


@dataclass(frozen=True)
class SavedLeaf:
    """A reference to a tensor that is not read yet: its part of the skeleton, which :func:`unflatten` takes."""

    node: list[Any]

    @property
    def wrapper(self) -> type | None:
        """The class that wraps its tensors; None where it is one plain tensor."""
        return self.node[1] if self.node[0] == "wrapper" else None

    @property
    def names(self) -> list[str]:
        """Of its tensors, by the names that :func:`flatten` gave."""
        if self.wrapper is None:
            return [self.node[1]]
        return [name for _, child in self.node[-1] if isinstance(child, list) for name in SavedLeaf(child).names]


def leaves(skeleton: Any) -> Any:
    """Put together the tree that :func:`flatten` took apart, with a :class:`SavedLeaf` in place of each tensor."""
    return _built(skeleton, SavedLeaf)


def leaf_paths(tree: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path to each tensor or :class:`SavedLeaf` of a tree, and the value."""
    if isinstance(tree, torch.Tensor | SavedLeaf):
        yield path, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, child in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaf_paths(child, *path, str(key))


def _built(node: Any, build: Callable[[list[Any]], Any]) -> Any:
    if not isinstance(node, list):
        return node
    kind, *rest = node
    if kind == "dict":
        return {key: _built(child, build) for key, child in rest[0]}
    if kind == "list":
        return [_built(child, build) for child in rest[0]]
    if kind == "tuple":
        return tuple(_built(child, build) for child in rest[0])
    if kind == "inline":
        return rest[0]
    assert kind in ("tensor", "wrapper"), kind
    return build(node)


class _Flattening:
    """The skeleton keeps plain values as they are; everything else is a list that begins with its kind."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._by_memory: dict[Any, str] = {}

    def node(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach() if value.requires_grad else value, path)
        if type(value) in _PLAIN:
            return value
        if isinstance(value, dict):
            if unfit := [key for key in value if type(key) not in (str, int)]:
                raise TypeError(f"{path or 'the state'} has the key {unfit[0]!r}: only str and int can be saved")
            return ["dict", [[key, self.node(child, _below(path, key))] for key, child in value.items()]]
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, [self.node(child, _below(path, number)) for number, child in enumerate(value)]]
        for base in (int, float, str):
            if isinstance(value, base):
                return base(value)
        raise TypeError(f"{path or 'the state'} is a {type(value).__qualname__}, which a checkpoint cannot hold")

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if tensor.is_meta:
            raise TypeError(f"{path or 'the state'} is a tensor on the meta device, which has no values")
        if isinstance(tensor, DTensor):
            return self._sharded(tensor, path)
        is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
            if not tensor.is_quantized:
                return self._plain(tensor.data if type(tensor) is torch.nn.Parameter else tensor, path)
        elif is_wrapper:
            wrapper: Any = tensor
            names, context = wrapper.__tensor_flatten__()
            inner = [[name, self.node(getattr(wrapper, name), _below(path, name))] for name in names]
            return ["wrapper", type(wrapper), context, wrapper.shape, wrapper.stride(), inner]
        return ["inline", tensor.to("cpu", copy=True)]

    def _plain(self, tensor: torch.Tensor, path: str) -> Any:
        stride = None if tensor.is_contiguous() or not _is_dense(tensor) else tensor.stride()
        views = (tensor.is_conj(), tensor.is_neg())
        name = self._by_memory.get(memory := (*_memory(tensor), *views))
        if name is None:
            name = self._by_memory[memory] = self._free_name(path or "tensor")
            self.tensors[name] = tensor.resolve_conj().resolve_neg()
        return ["tensor", name, stride]

    def _sharded(self, tensor: DTensor, path: str) -> Any:
        """As the tensor that it is a shard of."""
        if any(placement.is_partial() for placement in tensor.placements):
            raise TypeError(f"{path or 'the state'} is a DTensor that is not reduced yet ({tensor.placements})")
        local = tensor.to_local()
        memory = (*_memory(local), tensor.shape) if type(local) is torch.Tensor else path  # a wrapper has no memory
        name = self._by_memory.get(memory)
        if name is None:
            name = self._by_memory[memory] = self._free_name(path or "tensor")
            self.tensors[name] = tensor
        return ["tensor", name, None]

    def _free_name(self, path: str) -> str:
        """``{"a.b": x, "a": {"b": y}}`` and ``{0: x, "0": y}`` have one path for two tensors."""
        name, number = path, 1
        while name in self.tensors:
            number += 1
            name = f"{path}#{number}"
        return name


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What is the same for two tensors that are the same memory; also on a rank whose shards are empty and lie at no address."""
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gap or overlap, as channels_last and transposed ones do."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride() == tensor.stride()


def _with_stride(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

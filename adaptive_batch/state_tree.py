"""A nested state divided into its plain tensors, which any checkpoint format takes, and a small skeleton of all the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# What ``torch.load(weights_only=True)`` reads back as it was.
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


def flatten(tree: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Divide a nested state into plain tensors and a skeleton.

    Wrapper subclasses, such as torchao's low-bit optimizer states, are divided into the tensors that they wrap; other tensors that
    are not plain (sparse, quantized) stay in the skeleton, as copies on the host. Entries that are the same memory become one tensor.

    Args:
        tree: dicts with str or int keys, lists, tuples, tensors and plain values (bool, int, float, complex, str, None,
            ``torch.dtype``, ``torch.device``, ``torch.Size``), nested as they like. Subclasses of these, such as OrderedDict and
            numpy's float64, are taken for what they derive from.

    Returns:
        The plain tensors, detached, not copied, by the path to each (``model.layers.0.weight``), and the skeleton, which
        ``torch.load(weights_only=True)`` reads where it knows the wrapper classes.

    Raises:
        TypeError: something in the tree is none of these; its path is named.
    """
    flattening = _Flattening()
    return flattening.tensors, flattening.node(tree, "")


def unflatten(tensors: Mapping[str, torch.Tensor], skeleton: Any) -> Any:
    """The tree that :func:`flatten` divided: values bit for bit, keys in their order, dense tensors with their strides.

    Args:
        tensors: by the names that `flatten` gave; used as they are, not copied, where their strides are right.
        skeleton: of `flatten`.
    """
    restored: dict[str, torch.Tensor] = {}

    def build(node: Any) -> Any:
        if not isinstance(node, list):
            return node
        kind, *rest = node
        if kind == "dict":
            return {key: build(child) for key, child in rest[0]}
        if kind == "list":
            return [build(child) for child in rest[0]]
        if kind == "tuple":
            return tuple(build(child) for child in rest[0])
        if kind == "tensor":
            name, stride = rest
            if name not in restored:
                restored[name] = tensors[name] if stride is None else _with_stride(tensors[name], stride)
            return restored[name]
        if kind == "wrapper":
            cls, context, shape, stride, inner = rest
            return cls.__tensor_unflatten__({name: build(child) for name, child in inner}, context, shape, stride)
        assert kind == "inline", kind
        return rest[0]

    return build(skeleton)


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
        raise TypeError(f"{path or 'the state'} is a {type(value).__qualname__}, which a resume point cannot hold")

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if tensor.is_meta:
            raise TypeError(f"{path or 'the state'} is a tensor on the meta device, which has no values")
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
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), *views)
        name = self._by_memory.get(memory) if tensor.numel() else None  # empty tensors all lie at no address
        if name is None:
            name = self._free_name(path or "tensor")
            self.tensors[name] = tensor.resolve_conj().resolve_neg()
            self._by_memory[memory] = name
        return ["tensor", name, stride]

    def _free_name(self, path: str) -> str:
        """``{"a.b": x, "a": {"b": y}}`` and ``{0: x, "0": y}`` have one path for two tensors."""
        name, number = path, 1
        while name in self.tensors:
            number += 1
            name = f"{path}#{number}"
        return name


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gap or overlap, as channels_last and transposed ones do."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride() == tensor.stride()


def _with_stride(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

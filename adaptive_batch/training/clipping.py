"""Clipping of gradients that may lie on several meshes of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adaptive_batch.distributed import whole_tensor


def clip_gradients(model: nn.Module, max_grad_norm: float | None) -> torch.Tensor | None:
    """Clip the norm of all gradients to a maximum; return the norm that they had.

    Args:
        model: model whose gradients are clipped.
        max_grad_norm: maximum; infinity measures the norm alone, None does neither.
    """
    if max_grad_norm is None:
        return None
    # With tensor parallelism some parameters lie on other meshes, or on none.
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(by_mesh) <= 1:
        return whole_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
    norms = []
    for parameters in by_mesh.values():
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms.append(whole_tensor(torch.nn.utils.get_total_norm(gradients)))
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    for parameters in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    return norm

"""Forward passes that can be compared: without dropout, batch statistics, autocast and compiled
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from adaptive_batch._util import around_autocast, replaced

from .model_checks import is_batch_norm

_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


def _identity(input: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return input


@contextmanager
def exact_forward(model: nn.Module) -> Iterator[None]:
    """Disable dropout and compiled kernels, and let batch norms use their running statistics.

    The model stays in training mode, in which some models compute another loss. Functions are
    replaced, since activation checkpointing runs them again in backward, where a TorchFunctionMode
    is off.
    """
    attention = functional.scaled_dot_product_attention
    batch_norm = functional.batch_norm
    rrelu = functional.rrelu

    def without_dropout(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        return attention(query, key, value, attn_mask, 0.0, *rest, **options)

    def with_running_statistics(
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        training = training and running_mean is None
        return batch_norm(
            input, running_mean, running_var, weight, bias, training, *rest, **options
        )

    def without_draws(
        input: Any, lower: float = 1 / 8, upper: float = 1 / 3, *_: Any, **__: Any
    ) -> torch.Tensor:
        return rrelu(input, lower, upper)

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            # attention_dropout, layerdrop, drop_prob, drop_path_rate, the dropout of an LSTM.
            values: dict[str, Any] = {
                name: 0.0
                for name, value in vars(module).items()
                if "drop" in name and type(value) is float
            }
            if is_batch_norm(module):
                values["training"] = module.training and module.running_mean is None
            if values:
                stack.enter_context(replaced(module, **values))
        stack.enter_context(
            replaced(
                functional,
                scaled_dot_product_attention=without_dropout,
                batch_norm=with_running_statistics,
                rrelu=without_draws,
                **dict.fromkeys(_DROPOUTS, _identity),
            )
        )
        stack.enter_context(replaced(torch, dropout=_identity))
        yield


@contextmanager
def without_autocast(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Disable autocast, also for a function that enters it; yield a function that returns whether
    autocast was on.
    """
    is_used = torch.is_autocast_enabled(device.type)

    @contextmanager
    def disabled(autocast: Any) -> Iterator[None]:
        nonlocal is_used
        yield
        is_used = is_used or torch.is_autocast_enabled(autocast.device)
        torch.set_autocast_enabled(autocast.device, False)

    with around_autocast(disabled), torch.autocast(device.type, enabled=False):
        yield lambda: is_used

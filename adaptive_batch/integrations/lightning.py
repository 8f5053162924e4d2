"""Lightning's automatic optimization, whose steps run in parts that fit.

    trainer = Trainer(callbacks=[AdaptiveCallback(AdaptiveArguments(micro_batch_size="auto"))])

Clipping, precision, accumulation, loggers and checkpoints stay Lightning's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.utilities.memory import recursive_detach

from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.training import AdaptiveStep, Part

from .arguments import AdaptiveArguments

__all__ = ["AdaptiveArguments", "AdaptiveCallback"]

# Makes what Lightning runs of a batch; a private name of its loop, replaced while it trains.
_MAKES_CLOSURE = "_make_closure"
# What follows the name and the value.
_LOG_ARGUMENTS = list(signature(LightningModule.log).parameters)[3:]


class AdaptiveCallback(Callback):
    """Runs ``training_step`` and its backward in parts that fit, and again where memory runs out.

    What ``training_step`` logs of the parts of a batch is averaged by their shares, and logged once
    all of them have run: neither trials nor failed attempts are.

    Args:
        adaptive: how steps are run; None for :class:`AdaptiveArguments` as it is.

    Attributes:
        adaptive: how steps are run.
        step: what runs a step; None before training.
    """

    def __init__(self, adaptive: AdaptiveArguments | None = None) -> None:
        if adaptive is not None and not isinstance(adaptive, AdaptiveArguments):
            raise SettingError("adaptive", adaptive, "give AdaptiveArguments(...)")
        self.adaptive = adaptive or AdaptiveArguments()
        self.step: AdaptiveStep | None = None
        self._run: Callable[[Part], Any] = lambda part: None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            remedy = "call an AdaptiveStep in training_step, in place of this callback"
            raise SettingError("automatic_optimization", False, remedy)

        def forward_backward(part: Part) -> Any:
            return self._run(part)

        forward_backward.__name__ = "training_step"
        self.step = self.adaptive.new_step(trainer.strategy.model, forward_backward)
        loop = _loop(trainer)
        vars(loop)[_MAKES_CLOSURE] = lambda kwargs, optimizer, batch_idx: Closure(
            lambda: self._run_batch(trainer, pl_module, kwargs, optimizer, batch_idx)
        )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop(_MAKES_CLOSURE, None)

    def _run_batch(
        self,
        trainer: Trainer,
        module: LightningModule,
        kwargs: Mapping[str, Any],
        optimizer: torch.optim.Optimizer,
        batch_idx: int,
    ) -> ClosureResult:
        """Clear the gradients where they are to be, and leave those of a batch; return its loss."""
        assert self.step is not None, "training has begun"
        loop = _loop(trainer)
        clear = loop._make_zero_grad_fn(batch_idx, optimizer)
        if clear is not None:
            clear()
        backward = loop._make_backward_fn(optimizer)
        logged = _Logged(module)
        extra: dict[str, Any] = {}

        def run(part: Part) -> torch.Tensor | None:
            with logged.of(part):
                result = loop._training_step({**kwargs, "batch": part.batch})
                loss: torch.Tensor | None = result.closure_loss
                if loss is None:
                    return None
                # One part has Lightning's own bits.
                if part.share != 1.0:
                    loss = loss * part.share
                if backward is not None:
                    backward(loss)
            # Without the graph, which would keep the part's memory.
            extra.update(recursive_detach(result.extra))
            return loss.detach()

        self._run = run
        self._find_bound(trainer, self.step)
        losses = [loss for loss in self.step(kwargs["batch"]) if loss is not None]
        logged.log()
        loss = None
        if losses:
            loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        return ClosureResult(loss, extra)

    def _find_bound(self, trainer: Trainer, step: AdaptiveStep) -> None:
        if not step.sizer.waits_for_search:
            return
        loader = trainer.train_dataloader
        (optimizer,) = trainer.optimizers
        self.adaptive.find_bound(
            step,
            optimizer,
            loader,
            to_device=trainer.strategy.batch_to_device,
            batch_size=getattr(loader, "batch_size", None) or 1,
            accumulates=trainer.accumulate_grad_batches > 1,
        )


def _loop(trainer: Trainer) -> Any:
    """Return Lightning's loop over what an optimizer runs of a batch.

    Raises:
        AdaptiveBatchError: this release of Lightning has none that is known here.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    for name in (_MAKES_CLOSURE, "_make_zero_grad_fn", "_make_backward_fn", "_training_step"):
        if not hasattr(loop, name):
            raise AdaptiveBatchError(
                f"lightning {lightning.__version__} has no {name} in its automatic optimization;"
                " take lightning 2.5 or 2.6, or call an AdaptiveStep by manual optimization"
            )
    return loop


class _Logged:
    """What ``training_step`` logs of the parts of a batch.

    Args:
        module: module whose ``log`` is called.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        # By name, of each part: its share, the value, and what else was given.
        self._calls: dict[str, list[tuple[float, Any, dict[str, Any]]]] = {}

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Inside, what is logged waits for the other parts; of a trial it is dropped."""
        calls: dict[str, tuple[float, Any, dict[str, Any]]] = {}

        def log(name: str, value: Any, *arguments: Any, **given: Any) -> None:
            keywords = dict(zip(_LOG_ARGUMENTS, arguments, strict=False)) | given
            if isinstance(value, torch.Tensor) and not keywords.get("enable_graph"):
                value = value.detach()
            calls[name] = (part.share, value, keywords)

        vars(self._module)["log"] = log
        try:
            yield
        except BaseException:
            # The whole batch is run again, if anything is.
            self._calls.clear()
            raise
        finally:
            del vars(self._module)["log"]
        if not part.is_trial:
            for name, call in calls.items():
                self._calls.setdefault(name, []).append(call)

    def log(self) -> None:
        """Log what the parts have come to, as ``training_step`` of the whole batch would."""
        module: Any = self._module
        hook = module._current_fx_name
        module._current_fx_name = "training_step"
        try:
            for name, calls in self._calls.items():
                *_, (_, value, keywords) = calls
                if len(calls) > 1:
                    value = _over_parts(calls, keywords.get("reduce_fx", "mean"))
                if keywords.get("batch_size") is not None:
                    num_rows = sum(given["batch_size"] for *_, given in calls)
                    keywords = keywords | {"batch_size": num_rows}
                module.log(name, value, **keywords)
        finally:
            module._current_fx_name = hook


def _over_parts(calls: Sequence[tuple[float, Any, dict[str, Any]]], reduce_fx: Any) -> Any:
    """Return what a value is of all parts; the last one of what is no number, as a metric."""
    values = [value for _, value, _ in calls]
    if not all(isinstance(value, torch.Tensor | int | float) for value in values):
        return values[-1]
    if reduce_fx in ("sum", torch.sum):
        return sum(values)
    if reduce_fx in ("max", "min", torch.max, torch.min):
        extreme = max if reduce_fx in ("max", torch.max) else min
        return extreme(values)
    return sum(share * value for share, value, _ in calls)

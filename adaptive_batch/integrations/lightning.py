"""Lightning callback that runs each step of automatic optimization in micro-batches.

    trainer = Trainer(callbacks=[AdaptiveCallback(AdaptiveArguments(micro_batch_size="auto"))])

Lightning still handles clipping, precision, accumulation, loggers and checkpoints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.utilities.memory import recursive_detach
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MaxMetric, Metric, MinMetric, SumMetric

from adaptive_batch._util import instance_of, replaced
from adaptive_batch.distributed import Replicas
from adaptive_batch.errors import AdaptiveBatchError, DoesNotFitError, SettingError
from adaptive_batch.memory import check_segments, expand_segments_in_script
from adaptive_batch.training import AdaptiveStep, EvaluationParts, Part

from .arguments import TERMS, AdaptiveArguments
from .part_logs import MOST_ELEMENTS, MOST_ENTRIES, PartLogs, is_number, over_parts

__all__ = ["AdaptiveArguments", "AdaptiveCallback"]

_FIX = "lower batch_size of the DataLoader"
# Key of the mean that a step method returned.
_RETURNED = "the output"
_EVALUATIONS = ("validation_step", "test_step", "predict_step")
# Private methods of Lightning's loop. The first creates the closure of a batch; it is replaced
# during training.
_MAKES_CLOSURE = "_make_closure"
_USED = (_MAKES_CLOSURE, "_make_zero_grad_fn", "_make_backward_fn", "_training_step")
# Parameters after `self`.
_LOG_ARGUMENTS = list(signature(LightningModule.log).parameters)[1:]
# Attributes of modules that are not the script's own.
_OF_MODULES = vars(LightningModule()).keys()
# Packages whose objects do not hold values of the script.
_LIBRARIES = ("builtins", "lightning", "torch", "torchmetrics")
# Reductions of metrics other than a mean over rows.
_OF_METRICS: dict[type, str] = {SumMetric: "sum", MaxMetric: "max", MinMetric: "min"}


class _Step(AdaptiveStep):
    terms = replace(
        TERMS, function="training_step", share="return the mean of the batch from training_step"
    )


class AdaptiveCallback(Callback):
    """Runs ``training_step`` and backward in micro-batches, and repeats them after an OOM.

    The callback averages the values that ``training_step`` logs over the micro-batches, weighted by
    the micro-batches' shares of the labels, and logs each value once per batch. Metrics from
    torchmetrics count each row once. Neither includes trials and failed attempts. If a batch may be
    split, ``training_step`` must return only the loss.

    A batch of ``validation_step``, ``test_step`` or ``predict_step`` that runs out of memory is
    repeated in micro-batches, on that rank only. The method may return a mean, a tensor with one
    entry per row, or None.

    Args:
        adaptive: arguments; None for the defaults of :class:`AdaptiveArguments`.

    Attributes:
        adaptive: arguments.
        step: step of the model; None before training.
    """

    def __init__(self, adaptive: AdaptiveArguments | None = None) -> None:
        self.adaptive = instance_of(AdaptiveArguments, "adaptive", adaptive)
        growth = self.adaptive.batch_increase_function
        if growth is not None:
            remedy = "Lightning's loader decides the batch; give it batch_sampler=AdaptiveBatches()"
            raise SettingError("batch_increase_function", growth, remedy)
        # Lightning moves the model to its device later.
        expand_segments_in_script()
        self.step: AdaptiveStep | None = None
        # By the step method and the number of the loader.
        self._evaluations: dict[Any, EvaluationParts] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_segments(trainer.strategy.root_device)
        # What was found for another module may not hold for this one.
        self._evaluations = {}
        for name in _EVALUATIONS:
            evaluate = getattr(trainer.strategy, name)
            vars(trainer.strategy)[name] = partial(self._evaluate, trainer, name, evaluate)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            remedy = "call an AdaptiveStep in training_step, in place of this callback"
            raise SettingError("automatic_optimization", False, remedy)
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        for name in _USED:
            if not hasattr(loop, name):
                raise AdaptiveBatchError(
                    f"lightning {lightning.__version__} has no {name} in its automatic"
                    " optimization; take lightning 2.5 or 2.6, or call an AdaptiveStep by manual"
                    " optimization"
                )

        def forward_backward(part: Part) -> ClosureResult:
            return self._run_part(part)

        forward_backward.__name__ = f"{type(pl_module).__name__}.training_step"
        self.step = self.adaptive.new_step(_Step, trainer.strategy.model, forward_backward)
        vars(loop)[_MAKES_CLOSURE] = lambda *arguments: Closure(
            partial(self._run_batch, trainer, *arguments)
        )

    def _run_batch(
        self,
        trainer: Trainer,
        kwargs: Mapping[str, Any],
        optimizer: torch.optim.Optimizer,
        batch_idx: int,
    ) -> ClosureResult:
        """Run ``training_step`` and backward of a batch in micro-batches; return its loss.

        Args:
            trainer: trainer that owns the loop.
            kwargs: arguments of ``training_step``.
            optimizer: optimizer of the model.
            batch_idx: index of the batch.
        """
        assert self.step is not None, "on_train_start creates the step"
        if "batch" not in kwargs:
            remedy = "take batch and batch_idx, whose rows can be split"
            raise SettingError("training_step", f"takes {', '.join(kwargs)}", remedy)
        clear_gradients = trainer.fit_loop.epoch_loop.automatic_optimization._make_zero_grad_fn(
            batch_idx, optimizer
        )
        # None while Lightning accumulates gradients.
        if clear_gradients is not None:
            clear_gradients()
        module = trainer.lightning_module
        logs = _ModuleLogs(module)
        # The step, which was created once for all batches, calls this for each micro-batch.
        self._run_part = partial(_run_part, trainer, kwargs, optimizer, self.adaptive, logs)
        self._find_bound(trainer, self.step)
        results = self.step(kwargs["batch"])
        # Lightning logs by the hook in which `log` is called, and no hook is running here.
        with replaced(module, _current_fx_name="training_step"):
            logs.log()
        losses = [result.closure_loss for result in results if result.closure_loss is not None]
        loss = torch.stack(losses).sum() if losses else None
        # Only a batch that runs as a whole has other outputs.
        return ClosureResult(loss, extra=results[0].extra if results else {})

    def _find_bound(self, trainer: Trainer, step: AdaptiveStep) -> None:
        """Search for the largest micro-batch if it is ``auto`` and not found yet."""
        if not step.sizer.waits_for_search:
            return
        loader = trainer.train_dataloader
        sampler = getattr(loader, "batch_sampler", None)
        (optimizer,) = trainer.optimizers

        def to_device(batch: Any) -> Any:
            # The same steps in the same order as in Lightning's own loop.
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.lightning_module._on_before_batch_transfer(batch)
            return trainer.strategy.batch_to_device(batch)

        self.adaptive.find_bound(
            step,
            optimizer,
            loader,
            to_device=to_device,
            batch_size=getattr(sampler, "batch_size", None) or 1,
            accumulates=trainer.accumulate_grad_batches > 1,
        )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            replicas = Replicas(trainer.strategy.model)
            replicas.begin_step()
            # DDP's forward would broadcast the buffers of rank 0, but the training step bypasses
            # it. Entering this context broadcasts them, so that all ranks evaluate the same model.
            with replicas.micro_batch(evaluates=True):
                pass

    def _evaluate(
        self,
        trainer: Trainer,
        name: str,
        evaluate: Callable[..., Any],
        batch: Any,
        *numbers: int,
    ) -> Any:
        """Run a step method of an evaluation, in micro-batches if memory runs out.

        Args:
            trainer: trainer that evaluates.
            name: name of the method.
            evaluate: method of Lightning's strategy that calls it.
            batch: batch on the device.
            numbers: number of the batch, and number of the loader if there are several.
        """
        module = trainer.lightning_module
        if next(module.parameters(), None) is None:
            # No device shows whose memory could run out.
            return evaluate(batch, *numbers)
        logs = _ModuleLogs(module)
        output: Any = None
        # Names of the means of each micro-batch, with those of failed attempts.
        names: list[list[Any]] = []

        def forward(part: Any) -> tuple[torch.Tensor | None, Any]:
            """Return the means of a micro-batch as one tensor, and its output if it is no mean."""
            nonlocal output
            with logs.collect():
                output = evaluate(part, *numbers)
            means = {
                key: value
                for key, (value, metric, keywords) in logs.calls[-1].items()
                # Lightning's own error names other values.
                if is_number(value) and metric is None and _reduction(metric, keywords) == "mean"
            }
            # A tensor with a dimension has one entry for each row, even if there is only one row.
            returns_mean = is_number(output) and not getattr(output, "ndim", 0)
            if returns_mean:
                means[_RETURNED] = output
            names.append([*means])
            if names[-1] != names[0]:
                raise _cannot_split(name, "it logs or returns other names for other rows")
            of_rows = None if returns_mean else output
            if not means:
                return None, of_rows
            as_tensor = partial(torch.as_tensor, dtype=torch.float32, device=module.device)
            return torch.stack([as_tensor(mean).reshape(()) for mean in means.values()]), of_rows

        # The first split of each is checked, as another method or loader may give other results.
        key = (name, *numbers[1:])
        if key not in self._evaluations:
            self._evaluations[key] = EvaluationParts(
                trainer.strategy.model,
                split=self.adaptive.split,
                num_labels=self.adaptive.num_labels,
                is_sum=self.adaptive.loss_reduction == "sum",
                is_exact="mixed" not in str(trainer.precision),
                join=partial(_join_rows, name),
                state=partial(_state, module),
                fix=_FIX,
                options=self.adaptive.options,
            )
        reduced, of_rows, logs.weights = self._evaluations[key].run(
            batch, forward, snapshot=logs.snapshot
        )
        if len(logs.calls) > 1:
            logs.means = {key: reduced[number] for number, key in enumerate(names[0])}
            output = logs.means.get(_RETURNED, of_rows)
        logs.log()
        return output

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop(_MAKES_CLOSURE, None)
        for name in _EVALUATIONS:
            vars(trainer.strategy).pop(name, None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # Lightning does not call teardown after an error.
        self.teardown(trainer, pl_module, "fit")


class _ModuleLogs(PartLogs):
    """Logs of a module. A call has its value, its metric (None if a value was logged) and its
    keyword arguments; its key is the name and the number of earlier calls with this name.

    Attributes:
        means: values of the batch that are already reduced, by key.
    """

    def __init__(self, module: LightningModule) -> None:
        modules = [*module.modules()]
        metrics = [each for each in modules if isinstance(each, Metric)]
        others = [
            each
            for each in modules
            # Visiting the attributes of each layer in each batch takes time.
            if not isinstance(each, Metric)
            and not type(each).__module__.startswith(("torch.", "transformers."))
        ]
        super().__init__(module, others, metrics=metrics, skipped=_OF_MODULES)
        self.means: Mapping[Any, torch.Tensor] = {}

    def record(self, calls: dict[Any, Any], *arguments: Any, **given: Any) -> None:
        keywords = dict(zip(_LOG_ARGUMENTS, arguments, strict=False)) | given
        name, value = keywords.pop("name"), keywords.pop("value")
        metric = None
        if isinstance(value, Metric):
            metric = value
            # The value of the micro-batch; the metric itself accumulates over the epoch.
            value = metric._forward_cache
        if isinstance(value, torch.Tensor) and not keywords.get("enable_graph"):
            value = value.detach()
        num_earlier = sum(name == logged_name for logged_name, _ in calls)
        calls[name, num_earlier] = value, metric, keywords

    def log_values(self, key: Any, calls: Sequence[Any], weights: Sequence[float]) -> None:
        _, metric, keywords = calls[-1]
        values = [value for value, _, _ in calls]
        value = over_parts(values, weights, _reduction(metric, keywords))
        if metric is not None:
            # Lightning logs this value for the step and computes the epoch's from the state.
            metric._forward_cache = value
            value = metric
        if keywords.get("batch_size") is not None:
            num_rows = sum(given["batch_size"] for _, _, given in calls)
            keywords = keywords | {"batch_size": num_rows}
        name, _ = key
        self.logger.log(name, self.means.get(key, value), **keywords)


def _run_part(
    trainer: Trainer,
    kwargs: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    adaptive: AdaptiveArguments,
    logs: _ModuleLogs,
    part: Part,
) -> ClosureResult:
    """Run a micro-batch; return its loss, weighted by its share of the labels.

    Args:
        trainer: trainer that owns the loop.
        kwargs: arguments of ``training_step`` for the whole batch.
        optimizer: optimizer of the model.
        adaptive: arguments.
        logs: logs of the batch.
        part: micro-batch.

    Raises:
        SettingError: ``training_step`` returns other outputs, which cannot be joined.
    """
    is_sum = adaptive.loss_reduction == "sum"
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    with logs.of_part(part, part.num_rows if is_sum else part.share):
        result = loop._training_step({**kwargs, "batch": part.batch})
        if result.extra and adaptive.may_split:
            remedy = (
                "a batch that may be split returns only the loss; log other values with self.log,"
                " or give AdaptiveArguments no micro-batch size and"
                ' options=StepOptions(on_out_of_memory="raise")'
            )
            raise SettingError("training_step", f"returns {', '.join(result.extra)}", remedy)
        loss: torch.Tensor | None = result.closure_loss
        if loss is not None:
            # An unsplit batch stays bitwise equal to Lightning's.
            if part.share != 1.0 and not is_sum:
                loss = loss * part.share
            backward = loop._make_backward_fn(optimizer)
            hooks: dict[str, Any] = {}
            if not part.is_last:
                # Lightning's calls on_after_backward, but the batch's gradients are not complete.
                hooks["post_backward"] = lambda loss, module: loss.detach()
            if part.is_trial:
                # Lightning's backward hooks expect gradients, and a split check computes none.
                loss.backward()  # type: ignore[no-untyped-call]
            elif backward is not None:
                with replaced(trainer.precision_plugin, **hooks):
                    backward(loss)
            loss = loss.detach()
    # The graph would keep the micro-batch's activations alive.
    return ClosureResult(loss, extra=recursive_detach(result.extra))


def _cannot_split(name: str, problem: str) -> DoesNotFitError:
    return DoesNotFitError(f"{name} ran out of memory, and cannot run in parts: {problem}; {_FIX}")


def _join_rows(name: str, outputs: Sequence[Any]) -> torch.Tensor | None:
    """Join the outputs of a step method, which are None or tensors with one entry per row."""
    if outputs[0] is None:
        return None
    if not isinstance(outputs[0], torch.Tensor):
        problem = f"it returns {type(outputs[0]).__name__}, and only tensors can be joined"
        raise _cannot_split(name, problem)
    return torch.cat([*outputs])


def _state(module: LightningModule) -> list[torch.Tensor]:
    """Return the state that a step method may change: states of torchmetrics, buffers, and numbers
    and lengths in the other attributes.
    """
    states = []
    values = [*module.buffers()]
    for each in module.modules():
        if not isinstance(each, Metric):
            own = {name: value for name, value in vars(each).items() if name not in _OF_MODULES}
            values += _numbers_in(own)
            continue
        for state in each.metric_state.values():
            items = state if isinstance(state, list) else [state]
            # A state may also be a list of tuples.
            tensors = [item.reshape(-1).float() for item in items if torch.is_tensor(item)]
            if tensors:
                states.append(torch.cat(tensors))
    for value in values:
        # An int may be too large for torch.
        number = value % 2**63 if isinstance(value, int) else value
        tensor = torch.as_tensor(number, device="cpu").detach().reshape(-1)
        # Whole numbers are compared exactly.
        dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
        states.append(tensor.to(dtype, copy=True))
    return states


def _numbers_in(value: Any, num_levels: int = 4) -> Iterator[Any]:
    """Yield the numbers, small tensors and small arrays in a value, and the lengths of containers.

    Args:
        value: value; objects of the script, such as an average meter, count with their attributes.
        num_levels: levels of containers and objects whose items are visited.
    """
    if isinstance(value, Metric):
        value = value.metric_state
    is_of_script = type(value).__module__.partition(".")[0] not in _LIBRARIES
    has_attributes = hasattr(value, "__dict__") and not isinstance(value, Mapping | torch.Tensor)
    if is_of_script and has_attributes:
        value = vars(value)
    if isinstance(value, Mapping | list | deque):
        yield len(value)
        if num_levels and len(value) <= MOST_ENTRIES:
            for item in value.values() if isinstance(value, Mapping) else value:
                yield from _numbers_in(item, num_levels - 1)
        return
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.as_tensor(value.copy())
    is_small = isinstance(value, torch.Tensor) and value.numel() <= MOST_ELEMENTS
    if is_small or isinstance(value, int | float):
        yield value


def _reduction(metric: Metric | None, keywords: Mapping[str, Any]) -> str:
    """Return how the values of micro-batches are reduced to the value of the batch."""
    if metric is not None:
        return _OF_METRICS.get(type(metric), "mean")
    reduction = keywords.get("reduce_fx", "mean")
    return str(getattr(reduction, "__name__", reduction))

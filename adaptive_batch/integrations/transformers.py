"""Hugging Face Trainer that runs each training step in micro-batches.

    class Mine(SFTTrainer, AdaptiveTrainer):
        adaptive = AdaptiveArguments(micro_batch_size="auto")

Trainer still handles batches, accumulation, clipping, scaling, logs, saves and resuming.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import nested_detach

from adaptive_batch import distributed
from adaptive_batch._util import instance_of, replaced
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState
from adaptive_batch.training import AdaptiveStep, EvaluationParts, Part

from .arguments import TERMS, AdaptiveArguments
from .pairs import COLLATOR, by_pairs
from .part_logs import log_calls, merge_lists
from .transformers_growth import Growth, refuse_own_order, refuse_saved_growth

__all__ = ["AdaptiveArguments", "AdaptiveTrainer", "adopt"]

log = logging.getLogger("adaptive_batch")

# Losses of TRL's GRPOTrainer that are divided by the tokens of the whole step.
_SUMS_OVER_TOKENS = ("cispo", "dapo", "vespo")
# Modules whose `_prepare_inputs` truncates inputs to the longest answer: called per micro-batch.
_CUT_INPUTS = ("swift.trainers.seq2seq_trainer",)
# Attributes of TRL's trainers that hold metrics: lists with one number per batch.
_LISTS = {"_metrics", "_stored_metrics"}


class _Step(AdaptiveStep):
    terms = replace(TERMS, function="compute_loss")


@dataclass
class _Reduction:
    """Weight of the current micro-batch's loss in the loss of the step.

    Attributes:
        num_items: labels of all batches of the optimizer step; None if Trainer does not count them.
        share: weight of the micro-batch; 1.0 if its loss is a term of a sum.
        is_seen_sum: whether doubling the label count halved a loss; None before the check.
        is_agreed: whether all ranks use the same `is_seen_sum`.
    """

    num_items: Any = None
    share: float = 1.0
    is_seen_sum: bool | None = None
    is_agreed: bool = False

    def agree(self) -> None:
        """Synchronize `is_seen_sum` over all ranks; a collective until a rank has an answer.

        A rank whose loss was 0 has no answer. Its gradients were 0 with either reduction.
        """
        if self.is_agreed:
            return
        answers = distributed.all_gather(self.is_seen_sum)
        known = [answer for answer in answers if answer is not None]
        if known:
            self.is_seen_sum = all(known)
            self.is_agreed = True


class AdaptiveTrainer(Trainer):
    """Trainer that runs ``training_step`` in micro-batches and retries out-of-memory errors.

    List it as the last base of a class that derives from another subclass of Trainer, such as
    TRL's. The trainer prepares a batch once per step. Logs and metric attributes of
    ``compute_loss`` hold the values of the whole batch; trials and failed attempts do not count.
    Pairs of TRL's preference collator stay together and count as one row.

    An evaluation batch that runs out of memory is repeated in micro-batches, on that rank only.

    Args:
        *arguments: positional arguments of ``transformers.Trainer``.
        **keywords: keyword arguments of ``transformers.Trainer``.
        adaptive: arguments of this class; None for the class attribute.

    Attributes:
        adaptive: arguments of this class; may be set before ``train()``.
        adaptive_step: step of the model; None before the first step.
    """

    adaptive = AdaptiveArguments()

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Accept `adaptive` in subclasses whose other bases, such as TRL's, do not pass it on."""
        super().__init_subclass__(**keywords)
        init: Any = cls.__init__
        if "adaptive" in signature(init).parameters:
            return

        @wraps(init)
        def take_adaptive(
            self: Any, *arguments: Any, adaptive: AdaptiveArguments | None = None, **keywords: Any
        ) -> None:
            if adaptive is not None:
                self.adaptive = adaptive
            init(self, *arguments, **keywords)

        cls.__init__ = take_adaptive  # type: ignore[method-assign]

    def __init__(
        self, *arguments: Any, adaptive: AdaptiveArguments | None = None, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._begin(adaptive)

    def _begin(self, adaptive: AdaptiveArguments | None) -> None:
        """Initialize the state of this class; the step is created on first use."""
        if adaptive is not None:
            self.adaptive = adaptive
        self._check_arguments()
        self.adaptive_step: AdaptiveStep | None = None
        # `adaptive` when `adaptive_step` was created.
        self._adaptive_of_step: AdaptiveArguments | None = None
        self._reduction = _Reduction()
        self._metrics_of_step: _Metrics | None = None
        self._evaluation: EvaluationParts | None = None
        self._adaptive_of_evaluation: AdaptiveArguments | None = None
        self._num_fetched = 0
        self._growth: Growth | None = None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run forward and backward of a batch in micro-batches; return the loss as Trainer does.

        Raises:
            DoesNotFitError: a single row runs out of memory.
            SettingError: an argument is invalid, or the losses of the micro-batches do not add up
                to the loss of the batch.
        """
        self._reduction.num_items = num_items_in_batch
        # Trainer does so before it prepares a batch, and TRL's GRPOTrainer relies on the order.
        model.train()
        prepared, prepare_part = self._prepare_batch(inputs)
        self._metrics_of_step = metrics = _Metrics(self)
        with replaced(
            self,
            _prepare_inputs=prepare_part,
            compute_loss=partial(self._shared_loss, self.compute_loss),
        ):
            step = self._step_of(model)
            losses: list[torch.Tensor] = step(prepared)
        metrics.log()
        # `num_micro_batches` is equal on all ranks. Only split batches run the check.
        if step.num_micro_batches > 1:
            self._reduction.agree()
        if self._growth is not None:
            self._growth.set_rate(self.optimizer)
        # No micro-batch runs if the batch has no labels.
        loss = losses[0] if losses else torch.zeros((), device=self.args.device)
        if len(losses) > 1:
            loss = torch.stack([part.to(self.args.device) for part in losses]).sum()
        return loss

    def _prepare_batch(self, inputs: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return a batch on the device, and the function that prepares its micro-batches.

        Rows that a trainer generates from a batch are generated once.
        """
        if self._cuts_inputs:
            return Trainer._prepare_inputs(self, inputs), self._prepare_inputs
        return self._prepare_inputs(inputs), lambda part: part

    @property
    def _cuts_inputs(self) -> bool:
        return type(self)._prepare_inputs.__module__ in _CUT_INPUTS

    def _check_arguments(self) -> AdaptiveArguments:
        adaptive = instance_of(AdaptiveArguments, "adaptive", self.adaptive)
        if adaptive.batch_increase_function is not None:
            refuse_own_order(self, library=(AdaptiveTrainer, Trainer))
        return adaptive

    @property
    def _arguments(self) -> AdaptiveArguments:
        # `adaptive` may have been set after construction.
        adaptive = self._check_arguments()
        if adaptive.loss_reduction == "auto" and type(self.model).__name__.endswith("ForCTC"):
            reduction = getattr(self.model.config, "ctc_loss_reduction", "auto")
            adaptive = replace(adaptive, loss_reduction=reduction)
        if type(self.data_collator).__name__ == COLLATOR:
            return by_pairs(adaptive)
        return adaptive

    def _step_of(self, model: nn.Module) -> AdaptiveStep:
        """Return the step of a model; create it if the model or the arguments changed."""
        step = self.adaptive_step
        if step is None or step.model is not model or self._adaptive_of_step is not self.adaptive:
            self.adaptive_step = step = self._new_step(model)
            self._adaptive_of_step = self.adaptive
            self._reduction = _Reduction(num_items=self._reduction.num_items)
            self._find_bound(step)
        return step

    def _new_step(self, model: nn.Module) -> AdaptiveStep:
        adaptive = self._arguments
        if self.args.n_gpu > 1:
            remedy = "DataParallel splits batches itself; start a process a GPU with torchrun"
            raise SettingError("n_gpu", self.args.n_gpu, remedy)
        if self.is_deepspeed_enabled:
            raise SettingError("deepspeed", "enabled", "it reduces gradients itself; use FSDP2")

        def compute_loss(part: Part) -> torch.Tensor:
            return self._run_part(model, part)

        compute_loss.__name__ = f"{type(self).__name__}.compute_loss"
        return adaptive.new_step(_Step, model, compute_loss)

    def _run_part(self, model: nn.Module, part: Part) -> torch.Tensor:
        is_counted = not part.is_trial and part.share > 0.0
        metrics = self._metrics_of_step
        assert metrics is not None, "a part runs within a step"
        if not is_counted:
            metrics = _Metrics(self)
        elif part.is_first:
            # An earlier attempt may have updated the metrics, on ranks with enough memory too.
            metrics.restore()
        calls: list[dict[str, Any]] = []
        # Logs wait until all micro-batches have run.
        waits = replaced(self, log=lambda logs, *_, **__: calls.append(nested_detach(logs)))
        with waits:
            if self._reduction.is_seen_sum is None and part.is_trial:
                self._reduction.is_seen_sum = self._sees_sum(model, part)
            # The dummy micro-batch of a rank without rows has share 0 in a sum too.
            is_of_sum = self._is_sum_over_items and part.share
            self._reduction.share = 1.0 if is_of_sum else part.share
            loss: torch.Tensor = super().training_step(model, part.batch, self._reduction.num_items)
        if is_counted:
            is_sum = self._arguments.loss_reduction == "sum"
            metrics.logged.append((part.num_rows if is_sum else part.share, calls))
        else:
            metrics.restore()
        return loss

    def _shared_loss(
        self,
        compute_loss: Callable[..., Any],
        model: nn.Module,
        inputs: dict[str, Any],
        **keywords: Any,
    ) -> Any:
        """Compute the loss of a micro-batch and multiply it by its share."""
        result = compute_loss(model, inputs, **keywords)
        # An unsplit batch stays bitwise equal to Trainer's.
        if self._reduction.share == 1.0:
            return result
        if isinstance(result, tuple):
            loss, *outputs = result
            return (loss * self._reduction.share, *outputs)
        return result * self._reduction.share

    @property
    def _is_sum_over_items(self) -> bool:
        """True if the loss is divided by the labels of the whole step."""
        reduction = self._arguments.loss_reduction
        if reduction != "auto":
            return reduction == "sum"
        if getattr(self, "loss_type", None) in _SUMS_OVER_TOKENS:
            return True
        if self._reduction.num_items is None:
            return False
        if self._reduction.is_seen_sum is not None:
            return self._reduction.is_seen_sum
        # Not all Trainer releases have this attribute.
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is not None:
            return bool(is_scaled)
        return bool(self.model_accepts_loss_kwargs or self.compute_loss_func is not None)

    def _sees_sum(self, model: nn.Module, part: Part) -> bool | None:
        """Return whether doubling the label count halves the loss; None if not checked.

        Some Transformers models accept the label count and still return a mean.
        """
        # Ranks without rows would skip this forward, and FSDP's collectives would hang.
        if self.is_fsdp_enabled or not part.share:
            return None
        if self._reduction.num_items is None or not self._is_sum_over_items:
            return None
        self._reduction.share = 1.0
        losses = []
        for factor in (1, 2):
            # Both passes draw the same random numbers.
            with (
                torch.no_grad(),
                torch.compiler.set_stance("force_eager"),
                RandomState(self.args.device),
                self.compute_loss_context_manager(),
            ):
                loss = self.compute_loss(
                    model,
                    self._prepare_inputs(dict(part.batch)),
                    num_items_in_batch=self._reduction.num_items * factor,
                )
            losses.append(float(loss))
        once, halved = losses
        if not once or not math.isfinite(once):
            return None
        return abs(2 * halved - once) < 0.1 * abs(once)

    def _find_bound(self, step: AdaptiveStep) -> None:
        has_own_inputs = type(self)._prepare_inputs is not Trainer._prepare_inputs
        if step.sizer.waits_for_search and has_own_inputs and not self._cuts_inputs:
            reason = "this trainer generates its rows in each step; no trial can run before"
            raise self._arguments.not_searched(reason)
        # Trials run without the gradient scaler.
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        self._arguments.find_bound(
            step,
            optimizer,
            self.callback_handler.train_dataloader,
            to_device=super()._prepare_inputs,
            batch_size=self.args.train_batch_size,
            # A growing batch will be split later.
            accumulates=self.args.gradient_accumulation_steps > 1 or self._growth is not None,
        )

    def get_batch_samples(self, *arguments: Any) -> Any:
        """Fetch batches as Trainer does; warn if the first step did not call this class."""
        self._num_fetched += 1
        if self._num_fetched == 2 and self.adaptive_step is None:
            log.warning(
                "%s does not call AdaptiveTrainer.training_step, so no batch is split or run again"
                " after it runs out of memory; call super().training_step in it, or list"
                " AdaptiveTrainer as the first base of %s",
                self.training_step.__qualname__,
                type(self).__name__,
            )
        return super().get_batch_samples(*arguments)

    # --- evaluation

    def evaluation_loop(self, *arguments: Any, **keywords: Any) -> Any:
        """Evaluate as Trainer does; repeat a batch in micro-batches if it runs out of memory.

        Raises:
            DoesNotFitError: a single row runs out of memory, or micro-batches change the results.
        """
        # Wraps overrides too; once only, since compute_metrics may call predict.
        predict = self.prediction_step
        if getattr(predict, "func", None) != self._predict_parts:
            predict = partial(self._predict_parts, predict)
        with replaced(self, prediction_step=predict):
            return super().evaluation_loop(*arguments, **keywords)

    def _predict_parts(
        self,
        prediction_step: Callable[..., tuple[Any, ...]],
        model: nn.Module,
        inputs: dict[str, Any],
        *arguments: Any,
        **keywords: Any,
    ) -> tuple[Any, ...]:
        metrics = _Metrics(self)
        calls: list[list[dict[str, Any]]] = []
        count_of_parts = self._get_num_items_in_batch
        counted: list[Any] = []
        prepared: Any = None
        # Rows that the trainer generated are not generated again.
        prepare_part = self._prepare_inputs

        def prepare(batch: dict[str, Any]) -> Any:
            nonlocal prepared, prepare_part
            prepared, prepare_part = self._prepare_batch(batch)
            return prepared

        def count_of_batch(batches: list[Any], device: torch.device) -> Any:
            # Ranks count labels once per batch: the losses of its micro-batches are terms of a sum.
            if not counted:
                with distributed.alone(False):
                    counted.append(
                        count_of_parts(batches if prepared is None else [prepared], device)
                    )
            return counted[0]

        has_others = distributed.world_size() > 1

        def forward(batch: dict[str, Any]) -> dict[str, Any]:
            calls.append([])
            with replaced(
                self,
                _prepare_inputs=prepare_part,
                _get_num_items_in_batch=count_of_batch if has_others else count_of_parts,
                log=lambda logs, *_, **__: calls[-1].append(nested_detach(logs)),
            ):
                results = prediction_step(model, batch, *arguments, **keywords)
            return dict(zip(("loss", "logits", "labels"), results, strict=True))

        def snapshot() -> Callable[[], None]:
            nonlocal metrics
            before = _Metrics(self)
            num_calls = len(calls)
            if not calls:
                # Exclude the metrics that `prepare` updated.
                metrics = before
            random_state = RandomState(self.args.device)

            def restore() -> None:
                del calls[num_calls:]
                before.restore()
                random_state.restore()

            return restore

        results, weights = self._evaluation_of(model).run(
            inputs, forward, prepare=prepare, snapshot=snapshot
        )
        metrics.logged.extend(zip(weights, calls, strict=True))
        metrics.log()
        return tuple(results.values())

    def _evaluation_of(self, model: nn.Module) -> EvaluationParts:
        """Return the evaluation of a model; create it if the model or the arguments changed."""
        adaptive = self._arguments
        evaluation = self._evaluation
        if (
            evaluation is None
            or evaluation.model is not model
            or self._adaptive_of_evaluation is not self.adaptive
        ):
            is_sum = getattr(self, "loss_type", None) in _SUMS_OVER_TOKENS
            self._evaluation = evaluation = EvaluationParts(
                model,
                split=adaptive.split,
                num_labels=adaptive.num_labels,
                is_sum=is_sum or adaptive.loss_reduction == "sum",
                is_shifted=getattr(self, "_loss_shifts_labels", True),
                is_exact=self.accelerator.mixed_precision == "no",
                must_check=distributed.world_size() > 1,
                fix="lower per_device_eval_batch_size",
                options=adaptive.options,
            )
            self._adaptive_of_evaluation = self.adaptive
        return evaluation

    # --- batches that grow

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return Trainer's own loader, or a loader of growing batches.

        Raises:
            SettingError: an argument is incompatible with growing batches.
        """
        loader: DataLoader[Any] = super().get_train_dataloader()
        if self._growth is not None:
            self.remove_callback(self._growth)
            self._growth = None
        adaptive = self._arguments
        if adaptive.batch_increase_function is None:
            return loader
        if not hasattr(Trainer, "_run_epoch"):
            remedy = "install transformers 5.23, or use AdaptiveLoop"
            raise SettingError("transformers", transformers.__version__, remedy)
        self._growth = Growth(adaptive, self.args, loader)
        self.add_callback(self._growth)
        return self._growth.loader

    def set_initial_training_values(self, args: TrainingArguments, *arguments: Any) -> Any:
        """Return Trainer's values, with the epochs and steps of growing batches."""
        values = super().set_initial_training_values(args, *arguments)
        if self._growth is None:
            return values
        _, *between, max_steps = values
        if args.max_steps > 0:
            # Trainer stops at max_steps, regardless of the epoch.
            return (sys.maxsize, *between, max_steps)
        num_epochs = math.ceil(args.num_train_epochs)
        return (num_epochs, *between, self._growth.num_steps(args.num_train_epochs))

    def _init_training_state(self, *arguments: Any, **keywords: Any) -> tuple[int, int]:
        place: tuple[int, int] = super()._init_training_state(*arguments, **keywords)
        if self._growth is None:
            refuse_saved_growth(self.state)
        elif self.state.global_step:
            self._growth.resume(self.state)
            # The sampler has already skipped the used batches.
            place = (self._growth.batches.progress.epoch, 0)
        return place

    def _run_epoch(self, **keywords: Any) -> None:
        if self._growth is not None:
            steps_left = len(self._growth.batches)
            keywords |= {
                "steps_in_epoch": steps_left,
                "num_update_steps_per_epoch": steps_left,
            }
        super()._run_epoch(**keywords)

    def _get_learning_rate(self) -> float:
        if self._growth is not None and self._growth.learning_rate is not None:
            return self._growth.learning_rate
        return float(super()._get_learning_rate())


class _Adopted:
    """First base of an adopted trainer's class; skips ``__init_subclass__`` of the other bases."""

    def __init_subclass__(cls) -> None:
        """Do nothing: the trainer's own method may require keywords."""


def adopt(trainer: Trainer, adaptive: AdaptiveArguments | None = None) -> AdaptiveTrainer:
    """Make an existing trainer of any class run its steps as :class:`AdaptiveTrainer` does.

    The class of the trainer is replaced by a class of the same name that also derives from
    AdaptiveTrainer. Call this function before ``train()``; a second call has no effect.

    Args:
        trainer: trainer to change in place.
        adaptive: arguments; None for the defaults of :class:`AdaptiveArguments`.

    Returns:
        `trainer`.

    Raises:
        SettingError: `trainer` is not a ``transformers.Trainer``, or an argument is invalid.
    """
    kind = type(trainer)
    if not isinstance(trainer, Trainer):
        raise SettingError("trainer", kind.__name__, "give a transformers.Trainer")
    if not isinstance(trainer, AdaptiveTrainer):
        bases = (
            (_Adopted, AdaptiveTrainer) if kind is Trainer else (_Adopted, kind, AdaptiveTrainer)
        )
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        trainer.__class__ = type(kind.__name__, bases, names)
        assert isinstance(trainer, AdaptiveTrainer)
        trainer._begin(adaptive)
    return trainer


class _Metrics:
    """Snapshot of a trainer's metric attributes: nested numbers, strings and tensors.

    Attributes:
        logged: weight and ``log`` calls of each micro-batch since the snapshot.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.logged: list[tuple[float, list[dict[str, Any]]]] = []
        self._values = {
            name: _copied(value) for name, value in vars(trainer).items() if _is_count(value)
        }

    def log(self) -> None:
        """Reduce the logs and list entries of the micro-batches to one value for the batch."""
        weights = [weight for weight, _ in self.logged]
        for name in _LISTS & self._values.keys():
            merge_lists(vars(self._trainer)[name], self._values[name], weights)
        log_calls(self._trainer.log, self.logged)

    def restore(self) -> None:
        self.logged.clear()
        own = vars(self._trainer)
        for name in [name for name, value in own.items() if _is_count(value)]:
            if name not in self._values:
                del own[name]
        own.update({name: _copied(value) for name, value in self._values.items()})


def _is_count(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_count, value.values()))
    if isinstance(value, list | deque):
        return all(map(_is_count, value))
    return isinstance(value, int | float | str | torch.Tensor)


def _copied(value: Any) -> Any:
    """Copy nested containers and keep their types."""
    if isinstance(value, Mapping):
        copied_mapping: Any = copy.copy(value)
        for key, item in value.items():
            copied_mapping[key] = _copied(item)
        return copied_mapping
    if isinstance(value, list | deque):
        copied_list = copy.copy(value)
        for number, item in enumerate(value):
            copied_list[number] = _copied(item)
        return copied_list
    return value

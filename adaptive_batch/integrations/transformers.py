"""Hugging Face Trainer that runs each training step in micro-batches.

    class Mine(SFTTrainer, AdaptiveTrainer):
        adaptive = AdaptiveArguments(micro_batch_size="auto")

Trainer still handles batches, accumulation, clipping, scaling, logs, saves and resuming.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial, reduce, wraps
from inspect import signature
from typing import Any, cast

import torch
import transformers
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import nested_concat

from adaptive_batch import distributed
from adaptive_batch._util import check_built_alike, instance_of, replaced
from adaptive_batch.data import AdaptiveBatches, Sampling
from adaptive_batch.errors import SettingError
from adaptive_batch.training import (
    AdaptiveRate,
    AdaptiveStep,
    EvaluationParts,
    Part,
    RowsOfBatch,
    SplitBatch,
)

from .arguments import TERMS, AdaptiveArguments
from .part_logs import PartLogs, reduce_by_name

__all__ = ["AdaptiveArguments", "AdaptiveTrainer", "adopt"]

log = logging.getLogger("adaptive_batch")

# Losses of TRL's GRPOTrainer that are divided by the tokens of the whole step.
_SUMS_OVER_TOKENS = ("cispo", "dapo", "vespo")
# Losses of TRL's trainers that compare the rows of a batch: AOT sorts them, and KTO subtracts their
# mean KL divergence.
_COMPARE_ROWS = ("aot", "aot_pair", "aot_unpaired", "kto")
# Attributes of TRL's trainers that hold metrics: lists with one number per batch.
_METRICS = ("_metrics", "_stored_metrics")
# Attributes that no loss changes, and that may be large.
_SKIPPED = ("log_history", "train_dataset", "eval_dataset")
# Modules whose `_prepare_inputs` truncates inputs to the longest answer: called per micro-batch.
_CUT_INPUTS = ("swift.trainers.seq2seq_trainer",)
# Preference collators of TRL and of LLaMA-Factory, compared by name to avoid the imports.
_COLLATORS_OF_PAIRS = ("DataCollatorForPreference", "PairwiseDataCollatorWithPadding")
# Key of the data position of growing batches in Trainer's state, which is saved with each
# checkpoint.
_POSITION = "AdaptiveBatches"
# Trainer arguments that affect growing batches, with their required values.
_REQUIRED = {
    "gradient_accumulation_steps": (
        1,
        "a batch holds the rows of a whole step and runs in micro-batches; give 1",
    ),
    "train_sampling_strategy": ("random", "AdaptiveBatches draws the order of rows; give random"),
    "dataloader_drop_last": (False, "each row is used once per epoch; give False"),
}


class _Step(AdaptiveStep):
    terms = replace(TERMS, function="compute_loss")


class _TrainerLogs(PartLogs):
    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer, (trainer, trainer.state), skipped=_SKIPPED, merged=_METRICS)

    def record(self, calls: dict[Any, Any], *arguments: Any, **_: Any) -> None:
        values: Mapping[str, Any] = arguments[0]
        # Calls of micro-batches match if they have the same position and the same names.
        calls[len(calls), tuple(values)] = {
            name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }

    def log_values(self, key: Any, calls: Sequence[Any], weights: Sequence[float]) -> None:
        _, names = key
        self.logger.log(
            {
                name: reduce_by_name(name, [values[name] for values in calls], weights)
                for name in names
            }
        )


class AdaptiveTrainer(Trainer):
    """Trainer that runs ``training_step`` in micro-batches and retries out-of-memory errors.

    If your class derives from another subclass of Trainer, such as TRL's, list AdaptiveTrainer as
    the last base class. The trainer prepares a batch once per step. Logs and metric attributes of
    ``compute_loss`` have the values of the whole batch. Trials and failed attempts do not count.
    Pairs from a preference collator stay together and count as one row.

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
    adaptive_step: AdaptiveStep | None = None
    # `adaptive` when `adaptive_step` and `_evaluation` were created.
    _adaptive_of_step: AdaptiveArguments | None = None
    _adaptive_of_evaluation: AdaptiveArguments | None = None
    _evaluation: EvaluationParts | None = None
    _growth: _Growth | None = None
    _num_fetched = 0

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Accept `adaptive` in subclasses whose other bases, such as TRL's, do not pass it on.

        Raises:
            SettingError: a class attribute with arguments has another name.
        """
        super().__init_subclass__(**keywords)
        for name, value in vars(cls).items():
            if isinstance(value, AdaptiveArguments) and name != "adaptive":
                remedy = "no trainer reads this attribute; name it adaptive"
                raise SettingError(f"{cls.__name__}.{name}", value, remedy)
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
        self.adaptive = instance_of(AdaptiveArguments, "adaptive", adaptive or self.adaptive)
        super().__init__(*arguments, **keywords)

    # --- before the first step

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return Trainer's own loader, or a loader of growing batches.

        Raises:
            SettingError: an argument is incompatible with growing batches.
        """
        loader: DataLoader[Any] = super().get_train_dataloader()
        # A second call of train() begins with new batches.
        if self._growth is not None:
            self.remove_callback(self._growth)
            self._growth = None
        if self.adaptive.batch_increase_function is None:
            return loader
        if not hasattr(Trainer, "_run_epoch"):
            remedy = "install transformers 5.23, or use AdaptiveLoop"
            raise SettingError("transformers", transformers.__version__, remedy)
        self._growth = _Growth(self.adaptive, self.args, loader)
        self.add_callback(self._growth)
        return self._growth.loader

    def set_initial_training_values(self, args: TrainingArguments, *arguments: Any) -> Any:
        """Return Trainer's values, with the epochs and steps of growing batches.

        Raises:
            SettingError: the trainer has its own order of rows, which growing batches ignore.
        """
        if self.adaptive.batch_increase_function is not None:
            self._refuse_own_order()
        values = super().set_initial_training_values(args, *arguments)
        if self._growth is None:
            return values
        # Trainer's values begin with the number of epochs and end with the number of steps.
        _, *between, max_steps = values
        if args.max_steps > 0:
            # Trainer stops at max_steps, regardless of the epoch.
            return (sys.maxsize, *between, max_steps)
        num_epochs = math.ceil(args.num_train_epochs)
        return (num_epochs, *between, self._growth.num_steps(args.num_train_epochs))

    def _refuse_own_order(self) -> None:
        """Raise SettingError if the trainer or its class overrides the order of rows."""
        for owner in (self, *type(self).__mro__):
            overridden = {"_get_train_sampler", "get_train_dataloader"} & vars(owner).keys()
            if overridden and owner not in (AdaptiveTrainer, Trainer):
                name = getattr(owner, "__name__", "the trainer")
                remedy = (
                    "growing batches draw their own order of rows and would not call this method;"
                    " remove the method, remove batch_increase_function, or use AdaptiveBatches,"
                    " which accepts a sampler, in your own loop"
                )
                raise SettingError("batch_increase_function", f"{name}.{min(overridden)}", remedy)

    def _init_training_state(self, *arguments: Any, **keywords: Any) -> tuple[int, int]:
        """Return the finished epochs, and the batches of the current one that Trainer skips."""
        place: tuple[int, int] = super()._init_training_state(*arguments, **keywords)
        if self._growth is None:
            if _POSITION in self.state.stateful_callbacks:
                remedy = "its batch grew; give AdaptiveArguments the same batch_increase_function"
                step = f"step {self.state.global_step}"
                raise SettingError("resume_from_checkpoint", step, remedy)
        elif self.state.global_step:
            self._growth.resume(self.state)
            # The sampler resumes after the used batches, so Trainer must not skip any.
            place = (self._growth.batches.progress.epoch, 0)
        return place

    def _run_epoch(self, **keywords: Any) -> None:
        if self._growth is not None:
            # Trainer has computed these numbers for batches of the configured size.
            steps_left = len(self._growth.batches)
            keywords |= {
                "steps_in_epoch": steps_left,
                "num_update_steps_per_epoch": steps_left,
            }
        super()._run_epoch(**keywords)

    # --- a step

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

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run forward and backward of a batch in micro-batches; return the loss as Trainer does.

        Raises:
            DoesNotFitError: a single row runs out of memory.
            SettingError: an argument is invalid, or the losses of the micro-batches do not add up
                to the loss of the batch.
        """
        # Trainer calls train() before it prepares a batch, and TRL's GRPOTrainer relies on it.
        model.train()
        batch, prepare_part = self._prepare_batch(inputs)
        self._num_items_in_step = num_items_in_batch
        self._part_logs = logs = _TrainerLogs(self)
        with replaced(self, _prepare_inputs=prepare_part):
            step = self._step_of(model)
            losses = step(batch)
        logs.log()
        if self._growth is not None:
            self._growth.set_rate(self.optimizer)
        device = self.args.device
        # No micro-batch runs if the batch has no labels.
        return sum((loss.to(device) for loss in losses), torch.zeros((), device=device))

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

    def _step_of(self, model: nn.Module) -> AdaptiveStep:
        """Return the step of a model; create it if the model or the arguments changed."""
        step = self.adaptive_step
        if step is None or step.model is not model or self._adaptive_of_step is not self.adaptive:
            if self.args.n_gpu > 1:
                remedy = "DataParallel splits batches itself; start a process a GPU with torchrun"
                raise SettingError("n_gpu", self.args.n_gpu, remedy)
            if self.is_deepspeed_enabled:
                raise SettingError("deepspeed", "enabled", "it reduces gradients itself; use FSDP2")
            adaptive = self._arguments
            self._refuse_comparing_loss(adaptive)
            run_part: Any = partial(self._run_part, model, adaptive.loss_reduction == "sum")
            run_part.__name__ = f"{type(self).__name__}.compute_loss"
            self.adaptive_step = step = adaptive.new_step(_Step, model, run_part)
            self._adaptive_of_step = self.adaptive
            self._find_bound(step)
        return step

    def _refuse_comparing_loss(self, adaptive: AdaptiveArguments) -> None:
        """Raise SettingError if a batch may be split and TRL's loss compares its rows."""
        losses = getattr(self, "loss_type", getattr(self.args, "loss_type", None))
        for loss in losses if isinstance(losses, list) else [losses]:
            # TRL before 0.29 subtracts a running mean of the rewards of batches.
            has_running_mean = loss == "bco_pair" and hasattr(self, "running")
            if adaptive.may_split and (loss in _COMPARE_ROWS or has_running_mean):
                remedy = (
                    "it compares the rows of a batch, so no batch may be split; give"
                    " AdaptiveArguments no micro-batch size, and"
                    ' options=StepOptions(on_out_of_memory="raise")'
                )
                raise SettingError("loss_type", loss, remedy)

    @property
    def _arguments(self) -> AdaptiveArguments:
        """`adaptive`, with the loss reduction and the pairs that the trainer implies."""
        adaptive = self.adaptive
        if adaptive.loss_reduction == "auto":
            reduction = "mean"
            if getattr(self, "loss_type", None) in _SUMS_OVER_TOKENS:
                reduction = "sum"
            elif type(self.model).__name__.endswith("ForCTC"):
                reduction = getattr(self.model.config, "ctc_loss_reduction", "mean")
            adaptive = replace(adaptive, loss_reduction=reduction)
        if adaptive.split is None and _makes_pairs(self.data_collator):
            adaptive = replace(
                adaptive,
                split=_split_pairs,
                row_length=adaptive.row_length or _longer_of_pair,
                num_labels=adaptive.num_labels or _num_pairs,
            )
        return adaptive

    def _find_bound(self, step: AdaptiveStep) -> None:
        if not step.sizer.waits_for_search:
            return
        has_own_inputs = type(self)._prepare_inputs is not Trainer._prepare_inputs
        if has_own_inputs and not self._cuts_inputs:
            raise self.adaptive.not_searched(
                "this trainer generates its rows in each step; no trial can run before"
            )
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

    def _run_part(self, model: nn.Module, is_sum: bool, part: Part) -> torch.Tensor:
        """Run Trainer's training step of a micro-batch; multiply its loss by its share."""
        # The dummy micro-batch of a rank without rows has share 0 in a sum too.
        share = 1.0 if is_sum and part.share else part.share
        num_items = self._num_items_in_step
        methods: dict[str, Any] = {}
        # An unsplit batch stays bitwise equal to Trainer's.
        if share != 1.0:
            compute_loss = self.compute_loss
            methods["compute_loss"] = lambda *given, **named: compute_loss(*given, **named) * share
            if num_items is not None and share:
                # The loss may be divided by the labels of the step, or be a mean of this part:
                # with this number of labels, the share is right for both.
                num_items = num_items * share
        weight = part.num_rows if is_sum else part.share
        with self._part_logs.of_part(part, weight), replaced(self, **methods):
            loss: torch.Tensor = super().training_step(model, part.batch, num_items)
        return loss

    def _get_learning_rate(self) -> float:
        if self._growth is not None and self._growth.learning_rate is not None:
            return self._growth.learning_rate
        return float(super()._get_learning_rate())

    # --- evaluation

    def evaluation_loop(self, *arguments: Any, **keywords: Any) -> Any:
        """Evaluate as Trainer does; repeat a batch in micro-batches if it runs out of memory.

        Raises:
            DoesNotFitError: a single row runs out of memory, or micro-batches change the results.
        """
        # Replace the method of this object, so that overrides in subclasses are wrapped too.
        predict = self.prediction_step
        # The method is wrapped already if compute_metrics calls predict() within an evaluation.
        is_wrapped = getattr(predict, "func", None) == self._predict_parts
        if not is_wrapped:
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
        """Return the result of ``prediction_step``: loss, logits and labels of a batch."""
        batch, prepare_part = self._prepare_batch(inputs)
        logs = _TrainerLogs(self)
        count_labels = self._get_num_items_in_batch

        @cache
        def count_once() -> Any:
            # Counting is a collective, and ranks may run different numbers of parts. So count the
            # whole batch once. The losses of its parts, divided by this number, add up.
            with distributed.alone(False):
                return count_labels([batch], self.args.device)

        methods: dict[str, Any] = {"_prepare_inputs": prepare_part}
        if distributed.world_size() > 1:
            methods["_get_num_items_in_batch"] = lambda *_: count_once()

        def forward(part: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            with logs.collect(), replaced(self, **methods):
                loss, *outputs = prediction_step(model, part, *arguments, **keywords)
            named = zip(("logits", "labels"), outputs, strict=True)
            return loss, {name: value for name, value in named if value is not None}

        loss, outputs, weights = self._evaluation_of(model).run(
            batch, forward, snapshot=logs.snapshot
        )
        logs.weights = weights
        logs.log()
        return loss, outputs.get("logits"), outputs.get("labels")

    def _evaluation_of(self, model: nn.Module) -> EvaluationParts:
        """Return the evaluation of a model; create it if the model or the arguments changed."""
        evaluation = self._evaluation
        is_current = self._adaptive_of_evaluation is self.adaptive
        if evaluation is None or evaluation.model is not model or not is_current:
            adaptive = self._arguments
            self._evaluation = evaluation = EvaluationParts(
                model,
                split=adaptive.split,
                num_labels=adaptive.num_labels,
                is_sum=adaptive.loss_reduction == "sum",
                is_exact=self.accelerator.mixed_precision == "no",
                join=partial(reduce, nested_concat),
                fix="lower per_device_eval_batch_size",
                options=adaptive.options,
            )
            self._adaptive_of_evaluation = self.adaptive
        return evaluation


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
        bases = (AdaptiveTrainer,) if kind is Trainer else (kind, AdaptiveTrainer)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        trainer.__class__ = type(kind.__name__, bases, names)
        assert isinstance(trainer, AdaptiveTrainer)
        trainer.adaptive = instance_of(AdaptiveArguments, "adaptive", adaptive)
    return trainer


# --- growing batches


class _Growth(TrainerCallback):
    """Creates the growing batches of a run and tracks the position in the data.

    Args:
        adaptive: arguments of the trainer.
        arguments: arguments of Trainer.
        loader: Trainer's own loader, whose dataset, collator and workers are reused.

    Attributes:
        batches: batch sampler that yields the rows of each step.
        loader: loader of `batches`.
        learning_rate: rate of the last step; None before the first.

    Raises:
        SettingError: an argument is incompatible with growing batches.
    """

    def __init__(
        self, adaptive: AdaptiveArguments, arguments: TrainingArguments, loader: DataLoader[Any]
    ) -> None:
        for key, (required, remedy) in _REQUIRED.items():
            value = getattr(arguments, key, required)
            if value != required:
                raise SettingError(key, value, f"with batch_increase_function {remedy}")
        if distributed.world_size() > 1:
            remedy = "a batch grows on one process; on several use AdaptiveLoop or AdaptiveBatches"
            raise SettingError("batch_increase_function", "on several ranks", remedy)
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        self.batches = AdaptiveBatches(
            loader.dataset,
            arguments.train_batch_size,
            batch_increase_function=cast(Any, adaptive.batch_increase_function),
            sampling=Sampling(seed=seed),
        )
        self.loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self.batches,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            # Otherwise each start of the loader draws from torch's generator, and a run that
            # resumes within an epoch starts it once more.
            generator=torch.Generator(),
        )
        self._lr_scaling = adaptive.lr_scaling
        self._reference_rows = arguments.train_batch_size
        self._rate: AdaptiveRate | None = None
        self.learning_rate: float | None = None

    def num_steps(self, epochs: float) -> int:
        """Return the number of steps left of `epochs` epochs; the last epoch may be partial."""
        of_whole_epochs = self.batches.num_steps(math.floor(epochs))
        with_last_epoch = self.batches.num_steps(math.ceil(epochs))
        return of_whole_epochs + math.ceil((epochs % 1) * (with_last_epoch - of_whole_epochs))

    def resume(self, state: TrainerState) -> None:
        """Restore the position in the data from a checkpoint.

        Raises:
            SettingError: the checkpoint has no position, or belongs to other batches or another
                `lr_scaling`.
        """
        saved = state.stateful_callbacks.get(_POSITION)
        if saved is None:
            remedy = "it was saved without batch_increase_function; resume without it"
            raise SettingError("resume_from_checkpoint", f"step {state.global_step}", remedy)
        check_built_alike({"lr_scaling": self._lr_scaling}, saved, what="trainer")
        self.batches.load_state_dict(saved)

    def set_rate(self, optimizer: Optimizer) -> None:
        """Scale the learning rate that Trainer's scheduler set by the rows of the current step."""
        if self._rate is None:
            self._rate = AdaptiveRate(
                optimizer,
                lr_scaling=self._lr_scaling,
                reference_batch_size=self._reference_rows,
            )
        self.learning_rate = self._rate.set(rows=len(self.batches.oldest.own))["lr"]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any
    ) -> None:
        self.batches.step()
        state.epoch = self.batches.progress.epochs
        saved = {**self.batches.state_dict(), "lr_scaling": self._lr_scaling}
        state.stateful_callbacks[_POSITION] = saved


# --- batches of pairs


def _makes_pairs(collator: Any) -> bool:
    """Return whether a collator of TRL, LLaMA-Factory or ms-swift makes batches of pairs: all
    chosen rows, then all rejected rows in that order.
    """
    # ms-swift's collator is a partial of a method of its template. With padding_free, it packs all
    # rows into one.
    template: Any = getattr(getattr(collator, "func", None), "__self__", None)
    is_of_swift = getattr(template, "mode", "") == "rlhf" and not template.padding_free
    return is_of_swift or type(collator).__name__ in _COLLATORS_OF_PAIRS


def _num_pairs(batch: Mapping[str, Any]) -> int:
    return RowsOfBatch(batch).num_rows // 2


def _longer_of_pair(row: Mapping[str, Sequence[int]]) -> int:
    ids = "ids" if "chosen_ids" in row else "input_ids"
    longer = max(len(row[f"chosen_{ids}"]), len(row[f"rejected_{ids}"]))
    return len(row.get("prompt_ids", ())) + longer


def _split_pairs(batch: Mapping[str, Any]) -> SplitBatch:
    """Split a batch by pairs: its first half has the chosen rows, its second the rejected ones."""
    rows = RowsOfBatch(batch)
    num_pairs = rows.num_rows // 2

    def part(pairs: Sequence[int]) -> dict[str, Any]:
        chosen_and_rejected = rows.part([*pairs, *(num_pairs + pair for pair in pairs)])
        # Tensors with one entry per pair, such as the log-probabilities of the reference model.
        of_pairs = {
            key: value[list(pairs)]
            for key, value in batch.items()
            if isinstance(value, torch.Tensor) and value.dim() and len(value) == num_pairs
        }
        return {**chosen_and_rejected, **of_pairs}

    lengths = rows.lengths
    if lengths is not None:
        # Both rows are padded to the longer one.
        pairs_of_lengths = zip(lengths[:num_pairs], lengths[num_pairs:], strict=True)
        lengths = [2 * max(pair) for pair in pairs_of_lengths]
    return SplitBatch(num_pairs, part, lengths)

"""Training steps and validations of a run, in micro-batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torchtune import training, utils
from torchtune.data import padded_collate_sft
from torchtune.modules import TransformerDecoder

from adaptive_batch import distributed
from adaptive_batch.distributed import Sharding, local_part
from adaptive_batch.errors import DoesNotFitError, SettingError
from adaptive_batch.memory import OptimizerInBackward, RandomState, is_out_of_memory
from adaptive_batch.training import (
    MicroBatchSizer,
    RecipeStep,
    RowLoss,
    RowReference,
    TriedStep,
    norm_to_clip,
    pack_rows,
    why_not_packed,
)

from .changes import memory_remedies
from .configuration import one_line
from .data import Data
from .job import Job
from .model import FrozenModel, Weights

if TYPE_CHECKING:
    from .log import TrainingLog


class Trainer:
    """Model, loss and optimizer of a run, and the engine that runs micro-batches.

    Args:
        job, data: job and rows of the run.
        model: loaded model on its device, sharded if needed.
        sizer: limits a micro-batch of training.
        to_device: function that moves a batch in place; None for the job's device.
        new_optimizer: function that builds an optimizer of parameters; None for the configured one.
        second: frozen reference model of the task; None if the task has no separate one.

    Attributes:
        model, optimizer: model and optimizer of the run.
        models: module that contains all models.
        engine: runs the micro-batches of a step, without the optimizer.
        reference_sizer: limits a micro-batch of the reference; None if the reference runs within
            the micro-batches of training.
        in_backward: optimizer that steps each parameter in backward; None without
            `optimizer_in_bwd`.
        optimizers: torch's optimizers of the run: one, or one for each parameter with
            `optimizer_in_bwd`.
    """

    def __init__(
        self,
        job: Job,
        data: Data,
        model: torch.nn.Module,
        sizer: MicroBatchSizer,
        *,
        to_device: Callable[[dict[str, Any]], None] | None = None,
        new_optimizer: (
            Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None
        ) = None,
        second: torch.nn.Module | None = None,
    ) -> None:
        settings = job.settings
        if job.cfg.compile:
            for loss_fn in job.task.losses:
                training.compile_loss(loss_fn, verbose=distributed.is_rank_zero())
        training.validate_expected_param_dtype(model.named_parameters(), dtype=job.dtype)
        for each in (model, second):
            # It compares max_seq_len with all tokens of a packed batch. DatasetRows has compared
            # each row with it.
            if isinstance(each, TransformerDecoder) and job.max_seq_len is not None:
                each.max_seq_len = sys.maxsize
        self.model = model
        self._reference = FrozenModel(model, second)
        task = job.task
        task.prepare(model, second)
        self.models = self._reference.models
        self._job = job
        self._data = data
        self._offloads = bool(job.cfg.get("enable_activation_offloading", False))
        # Context manager of each forward; it does nothing without offloading.
        self._offloading = training.get_act_offloading_ctx_manager(model, self._offloads)
        # An optimizer in backward never has all gradients, so their norm cannot be clipped.
        max_grad_norm = None
        if not settings.optimizer_in_bwd:
            max_grad_norm = norm_to_clip(settings.clip_grad_norm, settings.on_nonfinite_loss)
        loss = RowLoss(
            collate=data.collator.to_length,
            to_device=to_device or partial(utils.batch_to_device, device=job.device),
            mean_loss=partial(task.mean_loss, self),
            count_labels=task.count_labels,
            row_length=task.length,
            num_real_tokens=data.dataset.num_real_tokens,
            dummy_row=lambda: data.dummy_row,
            pack=job.with_values(task.pack),
            counts_rows=task.counts_rows,
            metrics=task.metrics,
            loss_of=task.loss_of,
            after_forward=data.dataset.read_ahead,
        )
        reference = None
        self.reference_sizer: MicroBatchSizer | None = None
        reference_rows = settings.reference_micro_batch_size
        if reference_rows is not None:
            layout = sizer.layout
            # The reference's values of a row do not depend on the other rows, so rows of similar
            # length may run together, which needs the least padding.
            if layout.uniform is None:
                layout = replace(layout, kind="grouped")
            self.reference_sizer = sizer.for_other_pass("reference_limit", reference_rows, layout)
            reference = RowReference(
                partial(task.reference_values, self),
                task.num_reference_values,
                self.reference_sizer,
            )
        self.engine = RecipeStep(
            model,
            loss,
            sizer,
            memory=job.memory,
            retries=settings.on_out_of_memory == "shrink",
            remedies=memory_remedies(job.cfg, model, world_size=distributed.world_size()),
            max_grad_norm=max_grad_norm,
            scale_gradients=not settings.optimizer_in_bwd,
            measures_noise=settings.measures_noise,
            reference=reference,
            sharding=Sharding(
                self.models,
                finishes=distributed.data_parallel_size() == distributed.world_size(),
                syncs_every_micro_batch=settings.sync_gradients_every_micro_batch,
            ),
        )
        build_optimizer = new_optimizer or job.new_optimizer
        # The optimizer skips frozen parameters.
        parameters = model.parameters()
        self.in_backward: OptimizerInBackward | None = None
        if settings.optimizer_in_bwd:
            by_parameter = {
                parameter: build_optimizer([parameter])
                for parameter in parameters
                if parameter.requires_grad
            }
            self.in_backward = OptimizerInBackward(by_parameter)
            names = self.names_of_parameters
            self.optimizer = training.OptimizerInBackwardWrapper(
                {names[parameter]: optimizer for parameter, optimizer in by_parameter.items()}
            )
            self.optimizers = list(by_parameter.values())
        else:
            self.optimizer = build_optimizer(parameters)
            self.optimizers = [self.optimizer]

    @classmethod
    def load(cls, job: Job, data: Data, weights: Weights, sizer: MicroBatchSizer) -> Trainer:
        """Build the model, load its weights and build its optimizer.

        Raises:
            DoesNotFitError: the weights do not fit on the device.
        """
        # Refuse an invalid optimizer before the weights load, which takes minutes.
        job.optimizer_of_one_weight()
        second = None
        try:
            # Refuse missing files of the second model before the first one loads.
            build_second = None if job.second is None else job.second.prepare_build()
            model = job.builder.build(job.cfg, weights, dtype=job.dtype, device=job.device)
            if build_second is not None:
                second = build_second(dtype=job.dtype, device=job.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # No row has run yet, so the remedies for rows that do not fit would not help.
            raise DoesNotFitError(
                f"the weights alone ran out of memory on {job.device} ({one_line(error)}); give"
                " dtype=bf16, fewer tokens in model.max_seq_len, a smaller model, or divide it over"
                " several devices (tune run --nproc_per_node N)"
            ) from error
        return cls(job, data, model, sizer, second=second)

    def why_not_packed(self) -> str:
        """Return the reason why rows cannot be packed without padding; empty if they can.

        The two longest rows are run packed and padded, and their losses are compared. A collective.
        """
        task = self._job.task

        def token_loss(batch: dict[str, Any]) -> torch.Tensor:
            self.engine.loss.to_device(batch)
            return task.token_loss(self, batch)

        sequences = task.rows_of_sequences(self._data.longest(2))
        return why_not_packed(
            self.model,
            token_loss,
            sequences,
            collate=lambda sequences, length: padded_collate_sft(list(sequences)),
            pack=partial(pack_rows, ignore_index=task.ignore_index),
        )

    def allowed_layouts(self) -> tuple[str, ...]:
        """Return the layouts that a search may choose from. A collective."""
        settings = self._job.settings
        if settings.micro_batch_layout is not None:
            return (settings.micro_batch_layout,)
        # The noise scale compares a step with a random subset of it. Other layouts sort rows by
        # length, so their micro-batches are no random subsets.
        if settings.uniform_micro_batches or settings.measures_noise:
            return ("padded",)
        if self._data.why_unpacked or self.why_not_packed():
            return ("grouped",)
        return ("grouped", "packed")

    def check_layout(self) -> None:
        """Check that rows can be packed if the settings ask for it. A collective.

        Raises:
            SettingError: packed rows would train differently from padded ones.
        """
        settings = self._job.settings
        if settings.layout_kind != "packed":
            return
        reason = self.why_not_packed()
        if reason:
            remedy = f"{reason}; or give grouped"
            raise SettingError("micro_batch_layout", settings.micro_batch_layout, remedy)

    def is_finite(self) -> bool:
        """Return whether all trained parameters of this rank are finite."""
        return all(
            bool(local_part(parameter.detach()).isfinite().all())
            for parameter in self.model.parameters()
            if parameter.requires_grad
        )

    def reference_logits(self, **batch: Any) -> torch.Tensor | list[torch.Tensor]:
        """Compute the reference model's logits without gradients."""
        return self._reference.logits(**batch)

    def logits(self, **batch: Any) -> torch.Tensor | list[torch.Tensor]:
        """Compute the model's logits, with activation offloading as configured."""
        # A failed step leaves its activations in the tracker. Start again with an empty one.
        if self._offloads and self._offloading.tracker:
            self._offloading = type(self._offloading)()
        with self._offloading:
            logits: torch.Tensor | list[torch.Tensor] = self.model(**batch)
        return logits

    @property
    def names_of_parameters(self) -> dict[torch.nn.Parameter, str]:
        """Names of the parameters in checkpoints."""
        return {parameter: name for name, parameter in self.model.named_parameters()}

    def record_collectives(self) -> None:
        """Enable retries of the first micro-batch if one of several ranks runs out of memory."""
        retries = self._job.settings.on_out_of_memory == "shrink"
        # Recording runs a single row, for which a compiled model would compile once more.
        if distributed.world_size() > 1 and retries and not self._job.cfg.compile:
            self.engine.record_collectives_of_row()

    def step(self) -> None:
        """Run the optimizer step and clear the gradients.

        Raises:
            DoesNotFitError: out of memory after a part of the weights was updated, so the step
                cannot be repeated.
        """
        # An optimizer in backward has already stepped and cleared the gradients.
        if self.in_backward:
            return
        try:
            self.optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFitError(
                f"the optimizer step ran out of memory on {self._job.device}: {error}; it updated"
                " only a part of the weights and cannot be repeated. Resume from the last"
                " checkpoint with resume_from_checkpoint=True and use_maximum_batch_size=True (its"
                f" trials include the optimizer step), or {self.engine.attempts.remedies}"
            ) from error
        self.optimizer.zero_grad(set_to_none=True)

    def tried(self) -> TriedStep:
        """Return the step for trials of a search."""
        engine = self.engine
        # A rank that reduces gradients only after the last micro-batch keeps those of the others
        # unsharded until then, so trials have to count their memory.
        keeps_gradients = (
            distributed.world_size() > 1 and not self._job.settings.sync_gradients_every_micro_batch
        )
        return TriedStep(
            engine,
            self.in_backward or self.optimizer,
            engine.try_rows,
            engine.clip,
            row_length=engine.loss.row_length,
            keep_gradients=engine.keep_gradients if keeps_gradients else None,
            frozen_modules=() if self._reference.second is None else (self._reference.second,),
        )


class Validation:
    """Validation on rows of `dataset_val`, in micro-batches with a limit of their own.

    ``batch_size_val`` and ``max_validation_batches`` select the rows. The limit does not affect the
    selection.

    Args:
        job, data, trainer, log: job, rows, trainer and log of the run.
    """

    def __init__(self, job: Job, data: Data, trainer: Trainer, log: TrainingLog) -> None:
        settings = job.settings
        self._job = job
        self._data = data
        self._log = log
        engine = trainer.engine
        self._num_rows = settings.validated_rows(len(data.dataset_val), ranks=job.ranks)
        sizer = engine.sizer.for_other_pass(
            "validation_limit", settings.validation_batch_size, data.layout_val
        )
        self._evaluate = partial(engine.evaluate, loss=data.loss_val(engine.loss), sizer=sizer)

    def run_where_due(self, step: int) -> None:
        """Log the mean loss over the label tokens of the rows if the step interval has passed.

        The state of training is unchanged.
        """
        every = self._job.settings.run_val_every_n_steps
        if not every or step % every:
            return
        # Each rank runs every n-th row.
        first = distributed.data_parallel_rank()
        rank_rows = range(first, self._num_rows, distributed.data_parallel_size())
        # Restores the random state of training afterwards.
        with RandomState(self._job.device):
            loss = self._evaluate(self._data.dataset_val[row] for row in rank_rows)
        self._log.validation(loss, rows=self._num_rows, step=step)

"""The model of a run with its loss and optimizer: a step of training, as micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torchtune import training, utils
from torchtune.data import padded_collate_sft

from adaptive_batch import distributed
from adaptive_batch.data import PlannedRows
from adaptive_batch.distributed import Sharding, local_part
from adaptive_batch.errors import MEMORY_REMEDIES, DoesNotFitError, SettingError
from adaptive_batch.memory import OptimizerInBackward, is_out_of_memory
from adaptive_batch.training import (
    FORMS,
    BatchForm,
    MicroBatchSizer,
    RankReport,
    RecipeStep,
    RowLoss,
    RowReference,
    StepResult,
    TriedStep,
    kinds_to_choose_from,
    norm_to_clip,
)

from .config_errors import one_line
from .data import Data, Sizers
from .job import Job
from .model import FrozenModel, Weights

log = logging.getLogger("adaptive_batch")


class Trainer:
    """Model, loss and optimizer, and the engine of their micro-batches.

    Args:
        job, data: of the run.
        model: in its dtype on its device, loaded and divided.
        sizers: decide what a micro-batch may hold.
        to_device: moves a batch, in place; None moves it to the job's device.
        new_optimizer: builds an optimizer of some parameters; None takes the configured one.
        second: frozen model that a task compares with; None where there is none of its own.

    Attributes:
        model, optimizer: of the run.
        models: all models that are held, as one module.
    """

    def __init__(
        self,
        job: Job,
        data: Data,
        model: torch.nn.Module,
        sizers: Sizers,
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
        self.model = model
        self._reference = FrozenModel(model, second)
        job.task.prepare(model, second)
        self.models = self._reference.models
        self._job = job
        self._data = data
        self._offloading = bool(job.cfg.get("enable_activation_offloading", False))
        self._activations = training.get_act_offloading_ctx_manager(model, self._offloading)
        max_grad_norm = None
        if not settings.optimizer_in_bwd:
            max_grad_norm = norm_to_clip(settings.clip_grad_norm, settings.on_nonfinite_loss)
        self.engine = RecipeStep(
            model,
            self._row_loss(to_device or partial(utils.batch_to_device, device=job.device)),
            sizers.training,
            memory=job.memory,
            retries=settings.on_out_of_memory == "shrink",
            max_grad_norm=max_grad_norm,
            scale_gradients=not settings.optimizer_in_bwd,
            measures_noise=settings.measures_noise,
            reference=self._row_reference(sizers.reference),
            sharding=Sharding(
                self.models,
                finishes=distributed.data_parallel_size() == distributed.world_size(),
                syncs_every_micro_batch=settings.sync_gradients_every_micro_batch,
            ),
        )
        new_optimizer = new_optimizer or job.new_optimizer
        parameters = job.builder.trained(model)
        self.in_backward: OptimizerInBackward | None = None
        if settings.optimizer_in_bwd:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            optimizers = {parameter: new_optimizer([parameter]) for parameter in trained}
            self.in_backward = OptimizerInBackward(optimizers)
            names = self.names_of_parameters
            self.optimizer = training.OptimizerInBackwardWrapper(
                {names[parameter]: optimizer for parameter, optimizer in optimizers.items()}
            )
            self.optimizers = list(optimizers.values())
        else:
            self.optimizer = new_optimizer(parameters)
            self.optimizers = [self.optimizer]

    def _row_reference(self, sizer: MicroBatchSizer | None) -> RowReference | None:
        """Return the reference that runs in micro-batches of its own, where a sizer is for one."""
        if sizer is None:
            return None
        task = self._job.task
        assert task.num_reference_values, "the loss needs more of a reference than numbers"
        return RowReference(partial(task.reference_values, self), task.num_reference_values, sizer)

    def _row_loss(self, to_device: Callable[[dict[str, Any]], object]) -> RowLoss:
        """Return what the engine needs to know of rows and their loss."""
        task = self._job.task
        data = self._data
        return RowLoss(
            collate=data.collator.to_length,
            to_device=to_device,
            mean_loss=partial(task.mean_loss, self),
            count_labels=task.count_labels,
            row_length=task.length,
            num_real_tokens=data.dataset.num_real_tokens,
            dummy_row=lambda: data.dummy_row,
            join=self._job.with_values(self._join),
            counts_rows=task.counts_rows,
            metrics=task.metrics,
            loss_of=task.loss_of,
            after_forward=data.dataset.read_ahead,
        )

    @classmethod
    def load(cls, job: Job, data: Data, weights: Weights, sizers: Sizers) -> Trainer:
        """Build the model with its weights, and its optimizer.

        Raises:
            DoesNotFitError: the device has no room for the weights.
        """
        job.check_optimizer()
        if job.settings.preview:
            raise SettingError("preview", True, "it is for the recipes that train; remove it")
        second = None
        try:
            # Its files are looked for before any weights load.
            load_second = None if job.second is None else job.second.loading()
            model = job.builder.build(job.cfg, weights, dtype=job.dtype, device=job.device)
            if load_second is not None:
                second = load_second(dtype=job.dtype, device=job.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Not a row was tried, so what shortens them is no remedy.
            raise DoesNotFitError(
                f"the weights alone ran out of memory on {job.device} ({one_line(error)}); give"
                " dtype=bf16, fewer tokens in model.max_seq_len, a smaller model, or divide it over"
                " several devices (tune run --nproc_per_node N)"
            ) from error
        trainer = cls(job, data, model, sizers, second=second)
        if job.device.type != "cpu" and distributed.is_rank_zero():
            training.log_memory_stats(training.get_memory_stats(device=job.device))
        return trainer

    def _join(
        self, rows: Sequence[dict[str, Any]], form: BatchForm
    ) -> tuple[dict[str, Any], list[int]]:
        """Make rows one batch without padding, see :meth:`Task.join`."""
        batch, lengths = self._job.task.join(rows, form)
        self._take_tokens(batch)
        return batch, lengths

    def _take_tokens(self, batch: dict[str, Any]) -> None:
        """Let the models take a packed batch: torchtune's compare its tokens with what a row may
        have, which each row was.
        """
        models: tuple[Any, ...] = (self.model, self._reference.second)
        for model in models:
            if hasattr(model, "max_seq_len"):
                model.max_seq_len = max(model.max_seq_len, batch["tokens"].shape[-1])

    def why_unfit(self, kind: str) -> str:
        """Return why the longest rows in a kind of layout that does not pad would not train the
        model as padded ones do; empty where they would. All ranks call it.
        """
        task = self._job.task
        form = FORMS[kind]

        def token_loss(batch: dict[str, Any]) -> torch.Tensor:
            self.engine.loss.to_device(batch)
            return task.token_loss(self, batch)

        def pack(sequences: Sequence[dict[str, Any]]) -> dict[str, Any]:
            batch = form.join(sequences, ignore_index=task.ignore_index)
            self._take_tokens(batch)
            return batch

        sequences = task.rows_of_sequences(self._data.longest(2))
        return form.why_unfit(
            self.model,
            token_loss,
            sequences,
            collate=lambda sequences, length: padded_collate_sft(list(sequences)),
            pack=pack,
        )

    @cached_property
    def layout_kinds(self) -> tuple[str, ...]:
        """Kinds of layouts that a search may choose from; all ranks ask first together."""

        def why_unfit(kind: str) -> str:
            reason = self._data.why_unpacked or self.why_unfit(kind)
            if reason:
                log.info("rows are not %s: %s", kind, reason)
            return reason

        settings = self._job.settings
        configured = settings.micro_batch_layout
        if settings.measures_noise:
            # A layout that sorts rows by length leaves no random part of a step.
            configured = configured or "padded"
        return kinds_to_choose_from(
            why_unfit,
            configured=configured,
            uniform=settings.uniform_micro_batches,
        )

    def check_layout(self) -> None:
        """Refuse rows without padding that would not train as padded ones do; all ranks call it.

        Raises:
            SettingError: one is configured, and the model does not keep rows apart.
        """
        settings = self._job.settings
        if settings.layout_kind.pads:
            return
        reason = self.why_unfit(self._data.configured_layout.kind)
        if reason:
            remedy = f"{reason}; or give grouped"
            raise SettingError("micro_batch_layout", settings.micro_batch_layout, remedy)

    def is_finite(self) -> bool:
        """Return whether every number that trains is finite, of what this rank holds."""
        return all(
            bool(local_part(parameter.detach()).isfinite().all())
            for parameter in self.model.parameters()
            if parameter.requires_grad
        )

    def reference_logits(self, **batch: Any) -> torch.Tensor | list[torch.Tensor]:
        """Return the reference's logits, without gradients."""
        return self._reference.logits(**batch)

    def logits(self, **batch: Any) -> torch.Tensor | list[torch.Tensor]:
        """Return the model's logits; activations are offloaded as configured."""
        # A step that failed has left it as it was.
        if self._offloading and self._activations.tracker:
            self._activations = type(self._activations)()
        with self._activations:
            logits: torch.Tensor | list[torch.Tensor] = self.model(**batch)
        return logits

    @property
    def names_of_parameters(self) -> dict[torch.nn.Parameter, str]:
        """Names of the parameters in checkpoints."""
        return {parameter: name for name, parameter in self.model.named_parameters()}

    def to_save(self) -> Any:
        """Return what a checkpoint of an epoch holds of the model, on rank zero; a collective."""
        return self._job.builder.to_save(self.model, self._job.cfg, device=self._job.device)

    def model_state(self) -> Mapping[str, torch.Tensor]:
        """Return what a resume point holds of the model, as this rank holds it."""
        return self._job.builder.state(self.model)

    def record_collectives(self) -> None:
        """Let even the first micro-batch be retried that runs out of memory on one of several
        ranks.
        """
        shrinks = self._job.settings.on_out_of_memory == "shrink"
        # A compiled model would be compiled for one row more.
        if distributed.world_size() > 1 and shrinks and not self._job.cfg.compile:
            self.engine.record_collectives_of_row()

    def forward_backward(
        self,
        rows: Sequence[Any],
        step: PlannedRows,
        *,
        batch_size: int,
        ends: bool,
        measures_noise: bool,
    ) -> StepResult:
        """Run forward and backward of all micro-batches of a step, and clip the gradients; a
        collective.

        Args:
            rows: rows of this rank.
            step: plan of the step.
            batch_size: batch size of the run.
            ends: whether this process is asked to end.
            measures_noise: whether the noise of the gradients is sampled.
        """
        report = RankReport(
            batch_size=batch_size,
            num_rows=len(step.numbers),
            requested=step.progress.batch,
            ends=ends,
        )
        return self.engine.run(rows, report, measures_noise=measures_noise)

    def step(self) -> None:
        """Step and clear the gradients.

        Raises:
            DoesNotFitError: out of memory; some weights are stepped already, so this cannot be
                tried again.
        """
        # Each parameter has been stepped.
        if self.in_backward:
            return
        failure = None
        try:
            self.optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error)
        # Outside the except block, which keeps the tensors of the step alive.
        if failure is not None:
            raise DoesNotFitError(
                f"the optimizer's step ran out of memory on {self._job.device}: {failure}; some"
                " weights are stepped and others are not, so it cannot be tried again: what was"
                " saved before is whole, resume from it with resume_from_checkpoint=True and"
                f" use_maximum_batch_size=True (its trials know this phase), or {MEMORY_REMEDIES}"
            )
        self.optimizer.zero_grad(set_to_none=True)

    def tried(self) -> TriedStep:
        """Return the step that a search tries."""
        engine = self.engine
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
            held=() if self._reference.second is None else (self._reference.second,),
        )

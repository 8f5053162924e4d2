"""What the training recipe and the probe recipe share: the parts of a run, built from a torchtune configuration.

Building goes in an order that refuses mistakes before weights load: settings, device, tokenizer and data first, then the
model's skeleton, then the weights.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtune import config, training, utils
from torchtune.data import padded_collate_packed
from torchtune.datasets import ConcatDataset

from adaptive_batch import distributed
from adaptive_batch._util import cache_directory, described_with_files, fingerprint
from adaptive_batch.data import Batching, MicroBatchLayout, MicroBatchLimit, plan_token_batches, row_lengths
from adaptive_batch.distributed import Sharding
from adaptive_batch.errors import MEMORY_REMEDIES, AdaptiveBatchError, DoesNotFitError, SettingError
from adaptive_batch.memory import OptimizerInBackward, RandomState, device_memory, is_out_of_memory
from adaptive_batch.training import (
    LimitChange,
    MicroBatchLimits,
    MicroBatchRunner,
    OOMRetry,
    RowLoss,
    count_shifted_labels,
    lengthened,
)

from .checks import TOKEN_KEYS
from .configs import config_path, shipped_configs
from .keys import load_function
from .model import FullModel, ModelBuilder
from .requirements import TO_TRAIN, check_file, check_loss, complete, plainly, told
from .settings import Settings
from .sharded import Weights, check_names

log = logging.getLogger("adaptive_batch")

# What a row may have for its tokens to say what it takes: images, for example, take memory of their own.
_MEASURED_BY_TOKENS = {"tokens", "labels", "mask", "input_pos", "seq_lens"}

Collate = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]


def use_shipped_config(arguments: list[str]) -> None:
    """Replace the name of a shipped config after ``--config`` by its path, in place.

    Raises:
        SettingError: it is neither a file nor a shipped config, or a file that is no configuration.
    """
    if "--config" not in arguments[:-1]:
        return
    index = arguments.index("--config") + 1
    name = arguments[index]
    if Path(name).is_file():
        check_file(name)
        return
    path = config_path(name)
    if path is None:
        names = ", ".join(name for name, _ in shipped_configs())
        raise SettingError("--config", name, f"there is no such file and no such shipped config; shipped are {names}")
    arguments[index] = str(path)


def set_up_terminal() -> None:
    """Show decisions as they are made, and our own errors as one line: a traceback would hide what would do."""
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    log.propagate = False
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if "ADAPTIVE_BATCH_TRACEBACK" in os.environ:
            usual(kind, error, trace)
        elif (plain := plainly(error)) is not None:
            print(f"\n{type(plain).__name__}: {plain}", file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            print(
                "\ninterrupted; resume_from_checkpoint=True goes on from what was saved last",
                file=sys.stderr,
            )
        else:
            usual(kind, error, trace)

    sys.excepthook = hook


class TrainingParts:
    """Device, data, model, loss and optimizer of a run, and the search for the largest batch that they allow.

    Use :meth:`build_data`, :meth:`build_model`, :meth:`build_optimizer` in that order.

    Args:
        cfg: the recipe's configuration.
        settings: the same, checked.
        builder: builds the model; None for full fine-tuning.

    Attributes:
        ranks: that a batch is counted on, as many as saw different rows when the run began.

    Raises:
        SettingError: a key is missing or another recipe's, or a device, dtype or offloading setting cannot be used.
    """

    needs: ClassVar[Sequence[str]] = TO_TRAIN

    def __init__(self, cfg: DictConfig, settings: Settings, builder: ModelBuilder | None = None) -> None:
        complete(cfg, needs=self.needs)
        check_names(cfg)
        self.cfg = cfg
        self.settings = settings
        self.builder = builder or FullModel()
        self.ranks = distributed.data_parallel_size()
        try:
            self.device = utils.get_device(device=cfg.device)
        except RuntimeError as error:
            raise SettingError("device", cfg.device, f"{told(error)}; give cuda or cpu") from error
        if str(cfg.dtype) in ("fp16", "float16"):
            raise SettingError("dtype", cfg.dtype, "there is no gradient scaling for fp16; use bf16 or fp32")
        try:
            self.dtype = training.get_dtype(cfg.dtype, device=self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            why = f"{told(error).rstrip('.')}; " if isinstance(error, RuntimeError) else ""
            raise SettingError("dtype", cfg.dtype, f"{why}give bf16 or fp32") from error
        self._offloading = bool(cfg.get("enable_activation_offloading", False))
        self._checkpointing = bool(cfg.get("enable_activation_checkpointing", False))
        if self._offloading and self.device.type != "cuda":
            raise SettingError(
                "enable_activation_offloading", True, f"it needs CUDA, and device is {cfg.device}; set it to False"
            )
        if self._offloading and not self._checkpointing:
            raise SettingError("enable_activation_offloading", True, "it needs enable_activation_checkpointing=True")
        mode, option = cfg.get("ac_mode", None), cfg.get("ac_option", None)
        if mode not in (None, "none", "full", "selective"):
            raise SettingError("ac_mode", mode, "give full, selective with ac_option, or null")
        if mode in ("full", "selective") and self._checkpointing:
            raise SettingError(
                "ac_mode", mode, "enable_activation_checkpointing is True too, which says all layers; remove one"
            )
        if mode == "selective" and not (str(option).isdigit() and int(option) > 0):
            remedy = "give a whole number: of so many layers, the activations of one are recomputed"
            raise SettingError("ac_option", option, f"{remedy} (torchtune 0.6.1 knows no other)")
        if cfg.device == "npu" and cfg.compile:
            raise SettingError("compile", True, "an NPU does not compile; set it to False")

    # --- data -------------------------------------------------------------------------------------------------------

    def build_data(self) -> None:
        """Tokenizer, loss, dataset and collate function, with every check that needs them.

        Raises:
            SettingError: not all of the model is trained, the loss is none of next tokens, or the dataset is empty or has fewer
                rows than there are ranks.
        """
        cfg = self.cfg
        self.check_all_is_trained()
        self.tokenizer = self._build_tokenizer()
        self.loss_fn = config.instantiate(cfg.loss)
        self.dataset, self.packed = self._dataset("dataset")
        self.dataset_val: Any = None
        self._packed_val = False
        if self.settings.validation:
            self.dataset_val, self._packed_val = self._dataset("dataset_val")
        rows, ranks = len(self.dataset), distributed.data_parallel_size()
        if rows < ranks:
            remedy = f"its rows ({rows}) are fewer than the ranks ({ranks}); start at most {rows}, or give it more rows"
            raise SettingError("dataset", _names(cfg.dataset), remedy)
        self._choose_collate(pad_id=self.tokenizer.pad_id)
        first = self.dataset._datasets[0] if isinstance(self.dataset, ConcatDataset) else self.dataset
        self._pack_filler: int = getattr(first, "padding_idx", self._pad_id)  # torchtune's builders leave it at 0

    def _build_tokenizer(self) -> Any:
        try:
            return config.instantiate(self.cfg.tokenizer)
        except FileNotFoundError as error:
            remedy = "there is no such file; give the tokenizer's files (those of demo_cpu are made by `make demo`)"
            raise SettingError("tokenizer", error.filename, remedy) from error

    def check_all_is_trained(self) -> None:
        """Refuse a model with adapters before anything loads, where it can be built without memory; otherwise once it is there.

        Raises:
            SettingError: it has some.
        """
        try:
            model = self.skeleton
        except AdaptiveBatchError:
            raise
        except Exception as error:
            log.debug("the model cannot be built without memory: %s", error)
            return
        self.builder.check(model, self.cfg)

    def _choose_collate(self, *, pad_id: int) -> None:
        check_loss(self.loss_fn, self.cfg)
        collate = load_function(self.cfg.get("collate_fn", "torchtune.data.padded_collate_sft"), key="collate_fn")
        self._pad_id = pad_id
        self._padded: Collate = partial(collate, padding_idx=pad_id, ignore_idx=self.loss_fn.ignore_index)
        self.collate: Collate = padded_collate_packed if self.packed else self._padded
        self.collate_val: Collate = padded_collate_packed if self._packed_val else self._collate_lengthened

    def _collate_lengthened(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch of validation, padded as :attr:`shapes_val` asks for."""
        length = self.shapes_val.padded(max(len(row["tokens"]) for row in rows))
        ignored = self.loss_fn.ignore_index
        return self._padded(lengthened(rows, length, pad_id=self._pad_id, ignore_index=ignored))

    def _dataset(self, key: str) -> tuple[Any, bool]:
        """The dataset of a block, or of a list of them, and whether its rows are packed."""
        blocks = self.cfg[key]
        try:
            if isinstance(blocks, ListConfig):
                dataset = ConcatDataset([config.instantiate(block, self.tokenizer) for block in blocks])
                packed = bool(dataset.packed)
            else:
                dataset = config.instantiate(blocks, self.tokenizer)
                packed = bool(blocks.get("packed", False))
        except StopIteration:  # what `datasets` makes of an empty file
            raise SettingError(key, _names(blocks), "it has no rows; check its files") from None
        if len(dataset) == 0:
            raise SettingError(key, _names(blocks), "it has no rows; check its source, split and filter")
        return dataset, packed

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Tokens of every row, counted once and cached on disk: int64, `[rows]`."""
        return self._lengths("dataset", self.dataset)

    @cached_property
    def lengths_val(self) -> torch.Tensor:
        """The same of the rows that are validated on."""
        return self._lengths("dataset_val", self.dataset_val)

    @cached_property
    def real_lengths(self) -> torch.Tensor:
        """Tokens of every row that are not padding, as training counts them: int64, `[rows]`."""
        if not self.packed:
            return self.lengths
        random_state = RandomState(self.device)
        lengths = [self.num_real_tokens(self.dataset[row]) for row in range(len(self.dataset))]
        random_state.restore()
        return torch.tensor(lengths, dtype=torch.int64)

    def _lengths(self, key: str, dataset: Any) -> torch.Tensor:
        blocks = (self.cfg[key], self.cfg.tokenizer)
        described = [described_with_files(OmegaConf.to_container(block, resolve=True)) for block in blocks]
        fingerprints = [getattr(d._data, "_fingerprint", None) for d in _leaf_datasets(dataset) if hasattr(d, "_data")]
        name = fingerprint("lengths", described, fingerprints, package_version("torchtune"))
        cache_file = cache_directory() / f"lengths-{name}.bin"
        return distributed.from_rank_zero(lambda: row_lengths(dataset, cache_file=cache_file))

    def read(self, row: int) -> Any:
        """One row, leaving no trace in the random numbers that reading it may draw."""
        random_state = RandomState(self.device)
        try:
            return self.dataset[row]
        finally:
            random_state.restore()

    def check_rows(self) -> None:
        """Refuse settings that the rows do not allow.

        Raises:
            SettingError: fewer rows than one optimizer step takes, rows that tokens do not measure, or a row that is longer than
                a setting in tokens.
        """
        settings = self.settings
        step_rows, rows = settings.step_rows * self.ranks, len(self.dataset)
        if settings.drop_last and not settings.batch_tokens and rows < step_rows:
            of_ranks = f" of {self.ranks} ranks" if self.ranks > 1 else ""
            remedy = (
                f"one optimizer step{of_ranks} takes {step_rows} rows and the dataset has {rows}; lower batch_size or "
                "gradient_accumulation_steps, or set drop_last=False to train the short step"
            )
            raise SettingError("batch_size", settings.batch_size, remedy)
        measured = [key for key in (*TOKEN_KEYS, "uniform_micro_batches") if getattr(settings, key)]
        measured += ["pad_to_multiple_of"] if settings.pad_to_multiple_of > 1 else []
        if measured:
            row = self.read(0)
            lacks = not isinstance(row, Mapping) or not hasattr(row.get("tokens"), "__len__")
            others = [] if lacks else sorted(set(row) - _MEASURED_BY_TOKENS)
            if lacks or others:
                why = (
                    "rows have no list of tokens"
                    if lacks
                    else f"rows have {', '.join(others)}, which no tokens measure"
                )
                key = next((key for key in measured if self.cfg.get(key) is not None), measured[0])
                raise SettingError(key, self.cfg.get(key), f"{why}; remove it, and use micro_batch_size")
        if isinstance(settings.micro_batch_tokens, int):
            needed = self.shapes.padded(int(self.lengths.max()))
            if settings.micro_batch_tokens < needed:
                remedy = f"a row is padded to {needed} tokens; give {needed} or more, or shorten the rows (tokenizer.max_seq_len)"
                raise SettingError("micro_batch_tokens", settings.micro_batch_tokens, remedy)
        if settings.batch_tokens:
            divisible = settings.uniform_micro_batches in ("rows", "both")
            steps = plan_token_batches(self.lengths, self.batching(), ranks=self.ranks, order=None, divisible=divisible)
            if len(steps) == 0:
                most = int(self.lengths.max())
                remedy = (
                    f"every row has more than batch_tokens={settings.batch_tokens}; raise that, to {most} for all rows"
                )
                raise SettingError("long_rows", settings.long_rows, f"{remedy}, or give alone")
            if settings.drop_last and len(steps) == 1:
                remedy = "a step holds all rows of an epoch, and drop_last would drop it; lower batch_tokens"
                raise SettingError("batch_tokens", settings.batch_tokens, f"{remedy}, or set drop_last=False")
        if settings.validation:
            self._check_validation(settings.validation.rows_of(len(self.dataset_val), ranks=self.ranks))

    def _check_validation(self, num_rows: int) -> None:
        random_state = RandomState(self.device)
        labels = (label for row in range(num_rows) for label in self.dataset_val[row]["labels"][1:])
        has_labels = any(int(label) != self.loss_fn.ignore_index for label in labels)
        random_state.restore()
        if not has_labels:
            remedy = "no row that is validated on has a label; see its train_on_input and masks"
            raise SettingError("dataset_val", _names(self.cfg.dataset_val), remedy)

    def new_limits(self) -> MicroBatchLimits:
        """Return what a micro-batch may hold as configured, before anything was found."""
        return MicroBatchLimits(
            micro_batch_size=self.settings.micro_batch_size,
            micro_batch_tokens=self.settings.micro_batch_tokens,
            layout=self.shapes,
        )

    def batching(self, *, seed: int = 0, max_steps_per_epoch: int | None = None) -> Batching:
        """Return what a step holds and in which order rows come, as configured."""
        settings = self.settings
        same = {
            field.name: getattr(settings, field.name) for field in fields(Batching) if hasattr(settings, field.name)
        }
        same |= {
            "shuffle": bool(self.cfg.shuffle),
            "seed": 0 if settings.sample_order == "dataloader" else seed,  # 0 is the seed of torchtune's sampler
            "max_steps_per_epoch": max_steps_per_epoch,
        }
        return Batching(**same)

    def num_real_tokens(self, row: Mapping[str, Any]) -> int:
        """Tokens of a row that are not padding; only a packed row carries its own."""
        tokens = row["tokens"]
        if not self.packed:
            return len(tokens)
        real = (tokens != self._pack_filler).nonzero()
        return int(real[-1]) + 1 if len(real) else 0

    # --- model ------------------------------------------------------------------------------------------------------

    @cached_property
    def skeleton(self) -> torch.nn.Module:
        """The model without memory."""
        return self.builder.skeleton(self.cfg, dtype=self.dtype)

    @cached_property
    def max_seq_len(self) -> int | None:
        """The most tokens that the model takes; None where it does not say."""
        return getattr(getattr(self.skeleton, "decoder", self.skeleton), "max_seq_len", None)

    @cached_property
    def shapes(self) -> MicroBatchLayout:
        """What micro-batches are padded to; packed rows are as long as they may be."""
        multiple = 1 if self.packed else self.settings.pad_to_multiple_of
        shortest = 1 if self.packed else self._shortest
        longest = self.max_seq_len if multiple > 1 else None
        return MicroBatchLayout(self.settings.uniform_micro_batches, multiple, longest, shortest)

    @property
    def _shortest(self) -> int:
        """Tokens that rows are padded to at least.

        Where ranks gather the output layer by itself, they do so for each chunk of the sequence that the loss asks for, and all
        must have as many: n chunks where there are n (n - 1) + 1 tokens or more, fewer below that.
        """
        chunks = getattr(self.loss_fn, "num_output_chunks", 1)
        apart = distributed.data_parallel_size() > 1 and "output" in (self.cfg.get("custom_sharded_layers", None) or ())
        return min(chunks * (chunks - 1) + 1, self.max_seq_len or sys.maxsize) if apart else 1

    def build_model(
        self,
        weights: Weights,
        *,
        limit: Callable[[], MicroBatchLimit] | None = None,
        lower: Callable[[LimitChange], object] = lambda change: None,
    ) -> None:
        """Build the model in its dtype on its device, compiled, checkpointed and loaded as configured, and what runs its steps.

        Args:
            weights: what loads them.
            limit: returns what one micro-batch of training may hold now; None for a configured batch.
            lower: takes a limit that an out-of-memory error lowers.
        """
        cfg = self.cfg
        model = self._build(weights)
        if cfg.compile:
            training.compile_loss(self.loss_fn, verbose=distributed.is_rank_zero())
        training.validate_expected_param_dtype(model.named_parameters(), dtype=self.dtype)
        if type(self.loss_fn).__name__ == "CEWithChunkedOutputLoss":
            cast(Any, model).set_num_output_chunks(self.loss_fn.num_output_chunks)
        self.model = model
        self._activations = training.get_act_offloading_ctx_manager(model, self._offloading)
        norm = cfg.get("clip_grad_norm")
        configured = MicroBatchLimit(self.settings.batch_size)
        self.accumulator = MicroBatchRunner(
            model,
            RowLoss(
                collate=self._collate_to_length,
                to_device=self.to_device,
                mean_loss=self.mean_loss,
                count_labels=partial(count_shifted_labels, ignore_index=self.loss_fn.ignore_index),
                row_length=lambda row: len(row["tokens"]),
                num_real_tokens=self.num_real_tokens,
                dummy_row=lambda: self.dummy_row,
            ),
            retry=OOMRetry(
                limit or (lambda: configured),
                lower,
                memory=device_memory(self.device, shared_by=distributed.local_world_size()),
                retries=self.settings.on_out_of_memory == "shrink",
            ),
            layout=self.shapes,
            max_grad_norm=None if norm is None else float(norm),
            scale_gradients=not self.settings.optimizer_in_bwd,
            measures_noise=self.settings.measures_noise,
            sharding=Sharding(
                model,
                finishes=distributed.data_parallel_size() == distributed.world_size(),
                syncs_every_micro_batch=self.settings.sync_gradients_every_micro_batch,
            ),
        )

    def _build(self, weights: Weights) -> torch.nn.Module:
        """The model with its weights, divided where there are several ranks."""
        return self.builder.build(self.cfg, weights, dtype=self.dtype, device=self.device)

    @cached_property
    def dummy_row(self) -> Any:
        """The first row, every token of it labelled, for a rank that has none when others have."""
        row = self.read(0)
        tokens = (
            row["tokens"] if len(row["tokens"]) > 1 else [*row["tokens"], *row["tokens"]]
        )  # one has no label after the shift
        return {**row, "tokens": tokens, "labels": tokens}

    def _collate_to_length(self, rows: Sequence[dict[str, Any]], length: int) -> dict[str, Any]:
        longest = max(len(row["tokens"]) for row in rows)
        if length > longest:
            rows = lengthened(rows, length, pad_id=self._pad_id, ignore_index=self.loss_fn.ignore_index)
        return self.collate(rows)

    @cached_property
    def shapes_val(self) -> MicroBatchLayout:
        """The same of validation."""
        multiple = 1 if self._packed_val else self.settings.pad_to_multiple_of
        shortest = 1 if self._packed_val else self._shortest
        return MicroBatchLayout(None, multiple, self.max_seq_len if multiple > 1 else None, shortest)

    def to_device(self, batch: dict[str, Any]) -> None:
        """Move a batch to the device, in place."""
        utils.batch_to_device(batch, self.device)

    def mean_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """Loss of a batch on the device, averaged over its label tokens; position `i` predicts the label at `i + 1`."""
        labels = batch.pop("labels")
        if self._offloading and self._activations.tracker:  # a step that failed has left it as it was
            self._activations = training.OffloadActivations()
        with self._activations:
            logits = self.model(**batch)
        nothing = labels.new_full((labels.shape[0], 1), self.loss_fn.ignore_index)
        labels = torch.hstack((labels[..., 1:], nothing))
        if not isinstance(logits, list):
            labels = labels.reshape(-1)
            logits = logits.reshape(-1, logits.size(-1))
        loss: torch.Tensor = self.loss_fn(logits, labels)
        return loss

    # --- optimizer --------------------------------------------------------------------------------------------------

    def build_optimizer(self) -> None:
        """The optimizer, or one for each parameter inside the backward pass."""
        self.in_backward: OptimizerInBackward | None = None
        if not self.settings.optimizer_in_bwd:
            self.optimizer = self._new_optimizer(self.builder.trained(self.model))
            self.optimizers = [self.optimizer]
            return
        optimizers = {p: self._new_optimizer([p]) for p in self.builder.trained(self.model)}
        self.in_backward = OptimizerInBackward(optimizers)
        self.optimizer = training.create_optim_in_bwd_wrapper(self.model, optimizers)
        self.optimizers = list(optimizers.values())

    def _new_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = config.instantiate(self.cfg.optimizer, parameters)
        return optimizer

    @property
    def names_of_parameters(self) -> dict[torch.nn.Parameter, str]:
        """The names that checkpoints know parameters by."""
        return {parameter: name for name, parameter in self.model.named_parameters()}

    def step(self) -> None:
        """Step and clear the gradients.

        Raises:
            DoesNotFitError: out of memory; some weights are stepped already, so this cannot be tried again.
        """
        if self.in_backward:  # each parameter has been stepped
            return
        said = None
        try:
            self.optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            said = str(error)
        if said is not None:
            raise DoesNotFitError(
                f"the optimizer's step ran out of memory on {self.device}: {said}; some weights are stepped and others are not, "
                "so it cannot be tried again: what was saved before is whole, go on from there with "
                f"resume_from_checkpoint=True and use_maximum_batch_size=True (its trials know this phase), or {MEMORY_REMEDIES}"
            )
        self.optimizer.zero_grad(set_to_none=True)

    def rehearse_step(self) -> None:
        """Clip and step, as a trial does."""
        self.accumulator.clip()
        self.optimizer.step()


def _leaf_datasets(dataset: Any) -> list[Any]:
    """The datasets below concatenation and packing."""
    if isinstance(dataset, ConcatDataset):
        return [leaf for part in dataset._datasets for leaf in _leaf_datasets(part)]
    return _leaf_datasets(dataset.ds) if hasattr(dataset, "ds") else [dataset]


def _names(cfg_dataset: Any) -> str:
    blocks = cfg_dataset if isinstance(cfg_dataset, ListConfig) else [cfg_dataset]
    return ", ".join(str(block.get("source") or block.get("_component_")) for block in blocks)


def package_version(package: str) -> str | None:
    """The version of an installed package; None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None

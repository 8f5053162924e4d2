"""What the training recipe and the probe recipe share: the parts of a run, built from a torchtune configuration.

Building goes in an order that refuses mistakes before weights load: settings, device, tokenizer and data first, then the
model's skeleton, then the weights.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtune import config, modules, training, utils
from torchtune.data import padded_collate_packed
from torchtune.datasets import ConcatDataset

from adaptive_batch import distributed
from adaptive_batch.accumulation import Accumulator
from adaptive_batch.components import load_function
from adaptive_batch.counting import storage_bytes
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.fingerprint import described_with_files, fingerprint
from adaptive_batch.in_backward import OptimizerInBackward
from adaptive_batch.lengths import cache_directory, longest_rows, row_lengths
from adaptive_batch.memory import GIB, DeviceMemory, device_memory
from adaptive_batch.probe import ProbeResult, find_max_batch_size, load_result, save_result, try_again
from adaptive_batch.search import BinarySearch, Halving, Predictive, Search, Trial
from adaptive_batch.settings import Settings
from adaptive_batch.shipped import config_path, shipped_configs
from adaptive_batch.snapshot import RandomState, optimizer_state_tensors
from adaptive_batch.trial import Rehearsal

log = logging.getLogger("adaptive_batch")

# What a trial's memory depends on, of the configuration; the fingerprint of a cached bound is made of it.
_MEMORY_KEYS = [
    "model",
    "optimizer",
    "loss",
    "collate_fn",
    "dtype",
    "compile",
    "clip_grad_norm",
    "optimizer_in_bwd",
    "enable_activation_checkpointing",
    "enable_activation_offloading",
]


def use_shipped_config(arguments: list[str]) -> None:
    """Replace the name of a shipped config after ``--config`` by its path, in place.

    Raises:
        SettingError: it is neither a file nor a shipped config.
    """
    if "--config" not in arguments[:-1]:
        return
    index = arguments.index("--config") + 1
    name = arguments[index]
    if Path(name).is_file():
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
        elif isinstance(error, AdaptiveBatchError):
            print(f"\n{kind.__name__}: {error}", file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            print(
                "\ninterrupted; resume_from_checkpoint=True goes on after the last epoch that was saved",
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

    Raises:
        SettingError: a device, dtype or offloading setting cannot be used.
    """

    def __init__(self, cfg: DictConfig, settings: Settings) -> None:
        self.cfg = cfg
        self.settings = settings
        self._trials: dict[int | str, tuple[Callable[[int], list[dict[str, Any]]], int]] = {}
        self.device = utils.get_device(device=cfg.device)
        if str(cfg.dtype) in ("fp16", "float16"):
            raise SettingError("dtype", cfg.dtype, "there is no gradient scaling for fp16; use bf16 or fp32")
        self.dtype = training.get_dtype(cfg.dtype, device=self.device)
        self._offloading = bool(cfg.get("enable_activation_offloading", False))
        self._checkpointing = bool(cfg.get("enable_activation_checkpointing", False))
        if self._offloading and self.device.type != "cuda":
            raise SettingError(
                "enable_activation_offloading", True, f"it needs CUDA, and device is {cfg.device}; set it to False"
            )
        if self._offloading and not self._checkpointing:
            raise SettingError("enable_activation_offloading", True, "it needs enable_activation_checkpointing=True")
        if cfg.device == "npu" and cfg.compile:
            raise SettingError("compile", True, "an NPU does not compile; set it to False")

    # --- data -------------------------------------------------------------------------------------------------------

    def build_data(self) -> None:
        """Tokenizer, loss, dataset and collate function, with every check that needs them.

        Raises:
            SettingError: the dataset is empty, or smaller than one optimizer step.
        """
        cfg = self.cfg
        self.tokenizer = config.instantiate(cfg.tokenizer)
        self.loss_fn = config.instantiate(cfg.loss)
        try:
            if isinstance(cfg.dataset, ListConfig):
                self.dataset = ConcatDataset([config.instantiate(block, self.tokenizer) for block in cfg.dataset])
                self.packed = self.dataset.packed
            else:
                self.dataset = config.instantiate(cfg.dataset, self.tokenizer)
                self.packed = bool(cfg.dataset.get("packed", False))
        except StopIteration:  # what `datasets` makes of an empty file
            raise SettingError("dataset", _names(cfg.dataset), "it has no rows; check its files") from None
        if len(self.dataset) == 0:
            raise SettingError("dataset", _names(cfg.dataset), "it has no rows; check its source, split and filter")
        step_rows = self.settings.batch_size * self.settings.gradient_accumulation_steps
        if self.settings.drop_last and len(self.dataset) < step_rows:
            raise SettingError(
                "batch_size",
                self.settings.batch_size,
                f"one optimizer step takes {step_rows} rows and the dataset has {len(self.dataset)}; lower batch_size or "
                "gradient_accumulation_steps, or set drop_last=False to train the short step",
            )
        if self.settings.adaptive and not self.settings.use_maximum_batch_size:
            self._check_batch_size(most=self.most_rows, why=self.why_most)
        collate = load_function(cfg.get("collate_fn", "torchtune.data.padded_collate_sft"), key="collate_fn")
        self._pad_id: int = self.tokenizer.pad_id
        self.collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]] = (
            padded_collate_packed
            if self.packed
            else partial(collate, padding_idx=self._pad_id, ignore_idx=self.loss_fn.ignore_index)
        )

    @property
    def most_rows(self) -> int:
        """The most rows that are of use as a batch: what an epoch has for each micro-batch, and ``probe.maximum``."""
        return min(self.settings.probe.maximum, max(1, len(self.dataset) // self.settings.gradient_accumulation_steps))

    @property
    def why_most(self) -> str:
        """Where :attr:`most_rows` comes from."""
        if self.most_rows == self.settings.probe.maximum:
            return f"probe.maximum is {self.settings.probe.maximum}"
        accumulated = self.settings.gradient_accumulation_steps
        return f"an epoch has {len(self.dataset)} rows" + (
            f" for {accumulated} micro-batches" if accumulated > 1 else ""
        )

    def _check_batch_size(self, *, most: int, why: str) -> None:
        if self.settings.batch_size > most:
            raise SettingError("batch_size", self.settings.batch_size, f"{why}; give {most} or less")

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Tokens of every row, counted once and cached on disk: int64, `[rows]`."""
        cfg = self.cfg
        described = [
            described_with_files(OmegaConf.to_container(block, resolve=True)) for block in (cfg.dataset, cfg.tokenizer)
        ]
        fingerprints = [
            getattr(d._data, "_fingerprint", None) for d in _leaf_datasets(self.dataset) if hasattr(d, "_data")
        ]
        return row_lengths(
            self.dataset,
            cache_dir=cache_directory(),
            fingerprint=fingerprint("lengths", described, fingerprints, _version("torchtune")),
            show_progress=distributed.is_rank_zero(),
        )

    def num_real_tokens(self, row: Mapping[str, Any]) -> int:
        """Tokens of a row that are not padding; only a packed row carries its own."""
        tokens = row["tokens"]
        if not self.packed:
            return len(tokens)
        real = (tokens != self._pad_id).nonzero()
        return int(real[-1]) + 1 if len(real) else 0

    # --- model ------------------------------------------------------------------------------------------------------

    def check_model(self) -> None:
        """Choose the rows of trials, build the model without memory, and refuse what its size or length does not allow.

        Raises:
            SettingError: a probed length is beyond the model's, or the memory allowed is below what its weights need.
        """
        with torch.device("meta"), training.set_default_dtype(self.dtype):
            skeleton = config.instantiate(self.cfg.model)
        probe = self.settings.probe
        decoder = getattr(skeleton, "decoder", skeleton)
        longest = getattr(decoder, "max_seq_len", None)
        for length in dict.fromkeys((probe.sequence_length, *probe.sequence_lengths)):
            key = "probe.sequence_length" if length == probe.sequence_length else "probe.sequence_lengths"
            if longest and isinstance(length, int) and length > longest:
                raise SettingError(key, length, f"the model takes {longest} tokens at most")
            self._trials[length] = _, tokens = self._trial_rows(length)
            if longest and tokens > longest:
                remedy = f"rows have up to {tokens} tokens, and the model takes {longest} at most"
                raise SettingError(key, length, f"{remedy}; set tokenizer.max_seq_len={longest} or less")
        memory = device_memory(self.device)
        budget = probe.budget_bytes(total_bytes=memory.total_bytes(), available_bytes=memory.available_bytes(()))
        weights = sum(p.numel() * p.element_size() for p in skeleton.parameters())
        if weights > budget:
            raise SettingError(
                "probe.device_memory",
                probe.device_memory,
                f"the model's weights alone need {weights / GIB:.2f} GiB, and {budget / GIB:.2f} GiB may be used; "
                "allow more memory or take a smaller model",
            )

    def build_model(self, load_weights: Callable[[], Mapping[str, Any]]) -> None:
        """The model in its dtype on its device, compiled, checkpointed and loaded as configured."""
        cfg = self.cfg
        state = load_weights()
        with training.set_default_dtype(self.dtype), self.device:
            model = config.instantiate(cfg.model)
        if cfg.compile:
            training.compile_model(model)
            training.compile_loss(self.loss_fn)
        if self._checkpointing:
            training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
        model.load_state_dict(state)
        del state
        training.validate_expected_param_dtype(model.named_parameters(), dtype=self.dtype)
        if type(self.loss_fn).__name__ == "CEWithChunkedOutputLoss":
            model.set_num_output_chunks(self.loss_fn.num_output_chunks)
        self.model = model
        self._activations = training.get_act_offloading_ctx_manager(model, self._offloading)
        self.accumulator = Accumulator(
            model,
            collate=self.collate,
            to_device=partial(utils.batch_to_device, device=self.device),
            mean_loss=self.mean_loss,
            num_real_tokens=self.num_real_tokens,
            ignore_index=self.loss_fn.ignore_index,
            scale_gradients=not self.settings.optimizer_in_bwd,
        )

    def mean_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """Loss of a batch on the device, averaged over its label tokens; position `i` predicts the label at `i + 1`."""
        labels = batch.pop("labels")
        with self._activations:
            logits = self.model(**batch)
        nothing = labels.new_full((labels.shape[0], 1), self.loss_fn.ignore_index)
        labels = torch.hstack((labels[..., 1:], nothing))
        if not isinstance(logits, list):
            labels = labels.reshape(-1)
            logits = logits.reshape(-1, logits.size(-1))
        return self.loss_fn(logits, labels)

    # --- optimizer --------------------------------------------------------------------------------------------------

    def build_optimizer(self, state: Mapping[str, Any] | None) -> None:
        """The optimizer, or one for each parameter inside the backward pass; `state` of a run that is resumed."""
        self.in_backward: OptimizerInBackward | None = None
        if not self.settings.optimizer_in_bwd:
            self.optimizer = config.instantiate(self.cfg.optimizer, self.model.parameters())
            if state:
                self.optimizer.load_state_dict(state)
            self.optimizers = [self.optimizer]
            return
        optimizers = {p: config.instantiate(self.cfg.optimizer, [p]) for p in self.model.parameters()}
        self.in_backward = OptimizerInBackward(optimizers)
        self.optimizer = training.create_optim_in_bwd_wrapper(self.model, optimizers)
        if state:
            self.optimizer.load_state_dict(state)
        self.optimizers = list(optimizers.values())

    def step(self) -> torch.Tensor | None:
        """Clip, step and clear the gradients; returns the norm that they had, where clipping is configured."""
        if self.in_backward:  # each parameter has been stepped
            return None
        norm = self._clip_and_step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _clip_and_step(self) -> torch.Tensor | None:
        limit, norm = self.cfg.get("clip_grad_norm"), None
        if limit is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=float(limit))
        self.optimizer.step()
        return norm

    # --- probe ------------------------------------------------------------------------------------------------------

    def find_bound(self, *, length: int | str, accumulates: bool, path: Path) -> ProbeResult:
        """Find the largest number of rows whose forward and backward fit, with all that is resident in training.

        Args:
            length: ``longest``, ``max_seq_len`` or a number of tokens.
            accumulates: some step may have two micro-batches or more.
            path: the file of the result, which is believed after one trial if it depends on the same things.

        Raises:
            DoesNotFitError: one row does not fit.
        """
        random_state = RandomState(self.device)  # reading a row of some datasets draws from it
        try:
            return self._find_bound(length=length, accumulates=accumulates, path=path)
        finally:
            random_state.restore()

    def _find_bound(self, *, length: int | str, accumulates: bool, path: Path) -> ProbeResult:
        probe = self.settings.probe
        rows, tokens = self._trials.get(length) or self._trial_rows(length)
        memory = device_memory(self.device)
        resident = [*self.model.parameters(), *self.model.buffers(), *optimizer_state_tensors(self.optimizers)]
        available = memory.available_bytes(resident)
        if self.device.type == "cpu":  # the probe's own copies lie in the same memory
            available = max(1, available - storage_bytes(resident))
        budget = probe.budget_bytes(total_bytes=memory.total_bytes(), available_bytes=available)
        maximum = distributed.minimum(self.most_rows)
        rounds = probe.round_to_power_of_two and self.settings.use_maximum_batch_size
        depends_on = self._fingerprint(rows(1), tokens, memory, budget, maximum, accumulates, rounds)
        rehearsal = Rehearsal(
            model=self.model,
            optimizer=self.in_backward or self.optimizer,
            forward_backward=lambda size: self._rehearse(rows(size)),
            step=self._clip_and_step,
            accumulates=accumulates,
            memory=memory,
            budget_bytes=budget,
            row=f"one row of {tokens} tokens",
        )
        log.info(
            "probing rows of %d tokens on %s, up to %d rows in %.2f GiB",
            tokens,
            memory.describe(),
            maximum,
            budget / GIB,
        )

        def run_trial(size: int) -> Trial:
            rows(size)  # read before anything is measured
            return rehearsal(size)

        known = load_result(path, fingerprint=depends_on) if probe.cache else None
        try:
            with rehearsal:
                result = known and try_again(known, run_trial)
                if result is None:
                    result = find_max_batch_size(
                        run_trial,
                        search=self._search(
                            memory, budget_bytes=budget, maximum=maximum, resident_bytes=rehearsal.resident_bytes
                        ),
                        round_to_power_of_two=rounds,
                        sequence_length=tokens,
                    )
                result = replace(result, resident_bytes=rehearsal.resident_bytes, budget_bytes=budget)
        finally:
            if self.cfg.compile:
                torch._dynamo.reset()  # the sizes of trials must not use up the compiler's limit of variants
        if distributed.is_rank_zero() and not result.from_cache:
            save_result(result, path, fingerprint=depends_on)
        return result

    def _fingerprint(
        self,
        rows: Sequence[dict[str, Any]],
        tokens: int,
        memory: DeviceMemory,
        budget_bytes: int,
        maximum: int,
        accumulates: bool,
        rounds: bool,
    ) -> str:
        """A name for everything that a bound depends on."""
        plain = OmegaConf.to_container(self.cfg, resolve=True)
        assert isinstance(plain, dict)
        return fingerprint(
            {key: plain.get(key) for key in _MEMORY_KEYS},
            {name: _version(name) for name in ("torch", "torchtune", "torchao", "bitsandbytes", "adaptive-batch")},
            [memory.describe(), os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), os.environ.get("PYTORCH_ALLOC_CONF")],
            [self.settings.probe.search, tokens, maximum, accumulates, rounds, self.packed],
            _shapes(self.collate(rows)),
            # what is available moves a little from run to run; a bound is worth the same within a hundredth of it
            round(math.log(max(1, budget_bytes), 1.01)),
        )

    def _search(self, memory: DeviceMemory, *, budget_bytes: int, maximum: int, resident_bytes: int) -> Search:
        match self.settings.probe.search:
            case "binary":
                return BinarySearch(maximum=maximum)
            case "halve":
                return Halving(start=maximum)
            case _:
                return Predictive(
                    budget_bytes=budget_bytes,
                    maximum=maximum,
                    resident_bytes=resident_bytes,
                    granularity_bytes=memory.granularity_bytes,
                )

    def _rehearse(self, rows: Sequence[dict[str, Any]]) -> None:
        try:
            self.accumulator.rehearse(rows)
        except BaseException:
            if self._offloading:  # the offloading context's tracker is not empty after a failure
                self._activations = training.OffloadActivations()
            raise

    def _trial_rows(self, length: int | str) -> tuple[Callable[[int], list[dict[str, Any]]], int]:
        """A function that gives the first so many rows of a trial, and the tokens of the longest."""
        lengths = self.lengths
        order = longest_rows(lengths, len(lengths))
        longest = int(lengths[order[0]])
        if length == "max_seq_len":
            limit = getattr(self.tokenizer, "max_seq_len", None)
            if limit is None:
                raise SettingError(
                    "probe.sequence_length", length, "the tokenizer has no max_seq_len; set it, or give a number"
                )
            length = int(limit)
        target = longest if length == "longest" else int(length)
        if target < longest:
            log.warning(
                "rows of up to %d tokens exist, longer than the %d that are probed: they may not fit", longest, target
            )
        made: list[dict[str, Any]] = []

        def rows(count: int) -> list[dict[str, Any]]:
            while len(made) < count:
                row = self.dataset[order[len(made)]]
                made.append(row if length == "longest" else _resized(row, target))
            return made[:count]

        return rows, target


def _resized(row: dict[str, Any], length: int) -> dict[str, Any]:
    """A row of text cut or repeated to so many tokens."""
    if set(row) - {"tokens", "labels", "mask"}:
        others = ", ".join(sorted(set(row) - {"tokens", "labels", "mask"}))
        raise SettingError(
            "probe.sequence_length", length, f"rows with {others} have a length of their own; use longest"
        )
    return {key: (list(value) * (length // len(value) + 1))[:length] for key, value in row.items()}


def _leaf_datasets(dataset: Any) -> list[Any]:
    """The datasets below concatenation and packing."""
    if isinstance(dataset, ConcatDataset):
        return [leaf for part in dataset._datasets for leaf in _leaf_datasets(part)]
    return _leaf_datasets(dataset.ds) if hasattr(dataset, "ds") else [dataset]


def _names(cfg_dataset: Any) -> str:
    blocks = cfg_dataset if isinstance(cfg_dataset, ListConfig) else [cfg_dataset]
    return ", ".join(str(block.get("source") or block.get("_component_")) for block in blocks)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _shapes(batch: Any) -> Any:
    """Shapes and dtypes of the tensors in a batch, nested as they are."""
    if isinstance(batch, torch.Tensor):
        return [list(batch.shape), str(batch.dtype)]
    if isinstance(batch, Mapping):
        return {str(key): _shapes(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_shapes(value) for value in batch]
    return type(batch).__name__

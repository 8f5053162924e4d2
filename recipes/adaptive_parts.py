"""What the training recipe and the probe recipe share: the parts of a run, built from a torchtune configuration.

Building goes in an order that refuses mistakes before weights load: settings, device, tokenizer and data first, then the
model's skeleton, then the weights.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtune import __version__ as torchtune_version
from torchtune import config, modules, training, utils
from torchtune.data import padded_collate_packed
from torchtune.datasets import ConcatDataset

from adaptive_batch import __version__, distributed
from adaptive_batch.accumulation import Accumulator
from adaptive_batch.components import load_function
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.fingerprint import file_signature, fingerprint
from adaptive_batch.in_backward import OptimizerInBackward
from adaptive_batch.lengths import longest_rows, row_lengths
from adaptive_batch.memory import GIB, DeviceMemory, device_memory
from adaptive_batch.probe import ProbeResult, find_max_batch_size, load_result, save_result
from adaptive_batch.search import BinarySearch, Halving, Predictive, Search
from adaptive_batch.settings import Settings
from adaptive_batch.shipped import config_path, shipped_configs
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
        if isinstance(error, AdaptiveBatchError) and "ADAPTIVE_BATCH_TRACEBACK" not in os.environ:
            print(f"\n{kind.__name__}: {error}", file=sys.stderr)
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
        if isinstance(cfg.dataset, ListConfig):
            self.dataset = ConcatDataset([config.instantiate(block, self.tokenizer) for block in cfg.dataset])
            self.packed = self.dataset.packed
        else:
            self.dataset = config.instantiate(cfg.dataset, self.tokenizer)
            self.packed = bool(cfg.dataset.get("packed", False))
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
        collate = load_function(cfg.get("collate_fn", "torchtune.data.padded_collate_sft"), key="collate_fn")
        self._pad_id: int = self.tokenizer.pad_id
        self.collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]] = (
            padded_collate_packed
            if self.packed
            else partial(collate, padding_idx=self._pad_id, ignore_idx=self.loss_fn.ignore_index)
        )

    def lengths(self) -> torch.Tensor:
        """Tokens of every row, counted once and cached on disk: int64, `[rows]`."""
        cfg = self.cfg
        described = [
            _described_with_files(OmegaConf.to_container(block, resolve=True)) for block in (cfg.dataset, cfg.tokenizer)
        ]
        fingerprints = [
            getattr(d._data, "_fingerprint", None) for d in _leaf_datasets(self.dataset) if hasattr(d, "_data")
        ]
        return row_lengths(
            self.dataset,
            cache_dir=cache_directory(),
            fingerprint=fingerprint("lengths", described, fingerprints, torchtune_version),
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
        """Build the model without memory, and refuse what its size or its length does not allow, before weights load.

        Raises:
            SettingError: a probed length is beyond the model's, or the memory allowed is below what its weights need.
        """
        with torch.device("meta"), training.set_default_dtype(self.dtype):
            skeleton = config.instantiate(self.cfg.model)
        probe = self.settings.probe
        longest = getattr(skeleton, "max_seq_len", None) or getattr(
            getattr(skeleton, "decoder", None), "max_seq_len", None
        )
        for key, length in (
            ("sequence_length", probe.sequence_length),
            *(("sequence_lengths", s) for s in probe.sequence_lengths),
        ):
            if longest and isinstance(length, int) and length > longest:
                raise SettingError(f"probe.{key}", length, f"the model takes {longest} tokens at most")
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
        probe, cfg = self.settings.probe, self.cfg
        rows, tokens = self._trial_rows(length)
        memory = device_memory(self.device)
        resident = [*self.model.parameters(), *self.model.buffers()]
        budget = probe.budget_bytes(total_bytes=memory.total_bytes(), available_bytes=memory.available_bytes(resident))
        maximum = distributed.minimum(
            min(probe.maximum, max(1, len(self.dataset) // self.settings.gradient_accumulation_steps))
        )
        depends_on = fingerprint(
            {
                key: OmegaConf.to_container(OmegaConf.create({"v": cfg.get(key)}), resolve=True)["v"]
                for key in _MEMORY_KEYS
            },
            [memory.describe(), torch.__version__, torchtune_version, __version__],
            [len(rows(1)[0]["tokens"]), tokens, maximum, accumulates, probe.round_to_power_of_two],
            # what is available moves a little from run to run; a bound is worth the same within a hundredth of the device
            [round(100 * budget / memory.total_bytes())],
        )
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
        try:
            with rehearsal:
                known = load_result(path, fingerprint=depends_on) if probe.cache else None
                result = self._tried_again(known, rehearsal) or find_max_batch_size(
                    rehearsal,
                    search=self._search(
                        memory, budget_bytes=budget, maximum=maximum, resident_bytes=rehearsal.resident_bytes
                    ),
                    round_to_power_of_two=probe.round_to_power_of_two,
                    sequence_length=tokens,
                    resident_bytes=rehearsal.resident_bytes,
                    budget_bytes=budget,
                )
        finally:
            if cfg.compile:
                torch._dynamo.reset()  # the sizes of trials must not use up the compiler's limit of variants
        if distributed.is_rank_zero() and not result.from_cache:
            save_result(result, path, fingerprint=depends_on)
        return result

    def _tried_again(self, known: ProbeResult | None, rehearsal: Rehearsal) -> ProbeResult | None:
        """A bound from the cache after one trial of it; None where it no longer fits."""
        if known is None:
            return None
        again = find_max_batch_size(rehearsal, search=Halving(start=known.max_batch_size))
        if again.max_batch_size < known.max_batch_size:
            log.info("the cached bound of %d rows no longer fits; probing again", known.max_batch_size)
            return None
        return replace(known, trials=again.trials, seconds=again.seconds, from_cache=True)

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
        lengths = self.lengths()
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


def cache_directory() -> Path:
    """Where row lengths are kept between runs: ADAPTIVE_BATCH_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("ADAPTIVE_BATCH_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adaptive_batch"


def _leaf_datasets(dataset: Any) -> list[Any]:
    """The datasets below concatenation and packing."""
    if isinstance(dataset, ConcatDataset):
        return [leaf for part in dataset._datasets for leaf in _leaf_datasets(part)]
    return _leaf_datasets(dataset.ds) if hasattr(dataset, "ds") else [dataset]


def _described_with_files(value: Any) -> Any:
    """A configuration block in which each text that names a file or folder is followed by what is there."""
    if isinstance(value, dict):
        return {str(key): _described_with_files(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_described_with_files(item) for item in value]
    if isinstance(value, str) and value:
        with contextlib.suppress(OSError):
            if Path(value).exists():
                return [value, file_signature(value)]
    return value


def _names(cfg_dataset: Any) -> str:
    blocks = cfg_dataset if isinstance(cfg_dataset, ListConfig) else [cfg_dataset]
    return ", ".join(str(block.get("source") or block.get("_component_")) for block in blocks)

"""Small models of several families, planned on fake tensors and tried on real ones by the code of
the recipes; no file is read.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune import config, training
from torchtune.models.qwen2 import qwen2
from torchtune.modules.peft import get_adapter_params

from adaptive_batch.estimate import LengthEstimate
from adaptive_batch.probe import ProbeResult, Search, Trial
from adaptive_batch.torchtune import (
    Data,
    Job,
    LimitFinder,
    Settings,
    Trainer,
    builder_of,
    estimate_devices,
)
from adaptive_batch.torchtune.model import Weights
from adaptive_batch.torchtune.rows import RowMeasures
from adaptive_batch.training import BoundSearch, ProbeOptions, SearchScope

_NARROW = {
    "num_layers": 2,
    "num_heads": 4,
    "embed_dim": 64,
    "intermediate_dim": 160,
    "max_seq_len": 256,
}
_GROUPED = {**_NARROW, "vocab_size": 1000, "num_kv_heads": 2}

MODELS: dict[str, dict[str, Any]] = {
    "llama2": {"_component_": "torchtune.models.llama2.llama2", **_GROUPED},
    "llama3": {"_component_": "torchtune.models.llama3.llama3", **_GROUPED},
    "llama3_1": {"_component_": "torchtune.models.llama3_1.llama3_1", **_GROUPED},
    "llama3_2": {"_component_": "torchtune.models.llama3_2.llama3_2", **_GROUPED},
    "qwen2": {"_component_": "torchtune.models.qwen2.qwen2", **_GROUPED},
    "qwen2, tied": {
        "_component_": "torchtune.models.qwen2.qwen2",
        **_GROUPED,
        "tie_word_embeddings": True,
    },
    "qwen2, deep": {
        "_component_": "torchtune.models.qwen2.qwen2",
        **_GROUPED,
        "num_layers": 6,
        "vocab_size": 500,
    },
    "gemma": {"_component_": "torchtune.models.gemma.gemma", **_GROUPED, "head_dim": 16},
    "gemma2": {
        "_component_": "torchtune.models.gemma2.gemma2",
        **_GROUPED,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
    },
    "mistral": {"_component_": "torchtune.models.mistral.mistral", **_GROUPED},
    "phi3": {"_component_": "torchtune.models.phi3.phi3", **_GROUPED},
    "qwen2_5_0_5b": {"_component_": "torchtune.models.qwen2_5.qwen2_5_0_5b"},
    "llama3_2_1b": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"},
    "llama3_2_3b": {"_component_": "torchtune.models.llama3_2.llama3_2_3b"},
    "llama3_1_8b": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"},
    "qwen2_5_7b": {"_component_": "torchtune.models.qwen2_5.qwen2_5_7b_base"},
    "gemma2_2b": {"_component_": "torchtune.models.gemma2.gemma2_2b"},
    "phi4_14b": {"_component_": "torchtune.models.phi4.phi4_14b"},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"_component_": "torch.optim.AdamW"},
    "AdamW fused": {"_component_": "torch.optim.AdamW", "fused": True},
    "AdamW foreach": {"_component_": "torch.optim.AdamW", "foreach": True},
    "SGD": {"_component_": "torch.optim.SGD"},
    "SGD momentum": {"_component_": "torch.optim.SGD", "momentum": 0.9},
    "AdamW8bit": {"_component_": "torchao.optim.AdamW8bit"},
    "AdamW4bit": {"_component_": "torchao.optim.AdamW4bit"},
    "AdamWFp8": {"_component_": "torchao.optim.AdamWFp8"},
}
LOSSES = {
    "plain": "torch.nn.CrossEntropyLoss",
    "chunked": "torchtune.modules.loss.CEWithChunkedOutputLoss",
}
KD_LOSSES = {
    "plain": "torchtune.modules.loss.ForwardKLLoss",
    "chunked": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss",
}
# Of distillation; other models are taught by one like themselves.
TEACHERS = {"llama3_2_1b": "llama3_1_8b", "llama3_2_3b": "llama3_1_8b"}
ADAPTERS = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 8,
    "lora_alpha": 16,
}
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "": {},
    "checkpointing": {"enable_activation_checkpointing": True},
    "every 2nd layer": {"ac_mode": "selective", "ac_option": 2},
}


@dataclass(frozen=True)
class Combination:
    """One way of training: keys of the tables above, and the rest as the configuration has it."""

    model: str
    length: int
    optimizer: str = "AdamW fused"
    loss: str = "plain"
    checkpointing: str = ""
    dtype: str = "fp32"
    in_backward: bool = False
    packed: bool = False
    accumulation: int = 1
    clips: bool = False
    ranks: int = 1
    reshards: bool = True
    syncs: bool = True
    apart: tuple[str, ...] = ()
    device: str = "cpu"
    layout: str | None = None
    compiled: bool = False
    task: str = ""
    adapters: bool = False
    budget: float = 1.0  # of the activations that compiled parts keep

    def __str__(self) -> str:
        marks = [
            self.task,
            self.model + ", LoRA" * self.adapters,
            str(self.length),
            self.optimizer + " in backward" * self.in_backward,
            self.loss,
        ]
        marks += [
            self.checkpointing,
            "bf16" * (self.dtype == "bf16"),
            "packed" * self.packed,
            "clipping" * self.clips,
            "compiled" * self.compiled,
            f"budget {self.budget}" * (self.budget < 1),
            self.layout or "",
        ]
        marks += ["accumulating" * (self.accumulation > 1)]
        if self.ranks > 1:
            marks += [
                f"{self.ranks} ranks",
                "no resharding" * (not self.reshards),
                "late sums" * (not self.syncs),
            ]
            marks += [f"apart: {'+'.join(self.apart)}" if self.apart else ""]
        return ", ".join(filter(None, marks))

    def config(self, **probe: Any) -> DictConfig:
        """The configuration, with those keys in its ``probe`` block."""
        settings: dict[str, Any] = {
            "output_dir": "nowhere",
            "seed": 7,
            "model": MODELS[self.model],
            "tokenizer": {
                "_component_": "nowhere.tokenizer",
                "path": "nowhere/tokenizer.model",
                "max_seq_len": None,
            },
            "dataset": {
                "_component_": "nowhere.dataset",
                "source": "nowhere",
                "packed": self.packed,
            },
            "batch_size": 1,
            "shuffle": True,
            "gradient_accumulation_steps": self.accumulation,
            "epochs": 1,
            "optimizer": {**OPTIMIZERS[self.optimizer], "lr": 1e-4},
            "optimizer_in_bwd": self.in_backward,
            "loss": {"_component_": LOSSES[self.loss]},
            "device": self.device,
            "dtype": self.dtype,
            "compile": self.compiled,
            "activation_memory_budget": self.budget,
            "clip_grad_norm": 1.0 if self.clips else None,
            "use_maximum_batch_size": True,
            "micro_batch_layout": self.layout,
            "fsdp_reshard_after_forward": self.reshards,
            "sync_gradients_every_micro_batch": self.syncs,
            "custom_sharded_layers": list(self.apart),
            "probe": {"cache": False, "headroom": 0.0, "round_to_power_of_two": False, **probe},
            **CHECKPOINTING[self.checkpointing],
            **self._of_task(),
        }
        if self.adapters:
            module, _, function = settings["model"]["_component_"].rpartition(".")
            component = {"_component_": f"{module}.lora_{function}"}
            settings["model"] = {**settings["model"], **component, **ADAPTERS}
        cfg = OmegaConf.create(settings)
        assert isinstance(cfg, DictConfig)
        return cfg

    def _of_task(self) -> dict[str, Any]:
        """The keys of its task."""
        if not self.task:
            return {}
        model = MODELS[TEACHERS.get(self.model, self.model) if self.task != "DPO" else self.model]
        zeros = {
            "_component_": "support.model_families.ZeroWeights",
            "model": model,
            "dtype": self.dtype,
        }
        if self.task == "DPO":
            loss = {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}
            return loss if self.adapters else {**loss, "ref_checkpointer": zeros}
        return {
            "teacher_model": model,
            "teacher_checkpointer": zeros,
            "kd_loss": {"_component_": KD_LOSSES[self.loss]},
        }

    def to_estimate(self, **estimate: Any) -> DictConfig:
        """The configuration, with its length and those keys in its ``estimate`` block."""
        block = {"sequence_lengths": [self.length], "headroom": 0, **estimate}
        cfg = OmegaConf.merge(self.config(), {"estimate": block})
        assert isinstance(cfg, DictConfig)
        return cfg

    def planned(self, **estimate: Any) -> LengthEstimate:
        """Its estimate, of a single row too: on 1 MiB no two rows fit."""
        settings = {"devices": ["1MiB"], "changes": False, "world_size": self.ranks, **estimate}
        cfg = self.to_estimate(**settings)
        builder = builder_of(cfg)
        return estimate_devices(cfg, show=lambda text: None, builder=builder).lengths[0]


class RealRun:
    """The objects of a recipe with random weights and any number of rows of one length."""

    def __init__(self, combination: Combination, **probe: Any) -> None:
        cfg = combination.config(**probe)
        settings = Settings.from_config(OmegaConf.to_container(cfg, resolve=True))
        self.job = job = Job(cfg, settings, builder_of(cfg))
        generator = torch.Generator().manual_seed(0)
        length, packed = combination.length, bool(cfg.dataset.packed)
        tokens = torch.randint(1, 400, (length,), generator=generator)
        row: dict[str, Any] = {"tokens": tokens.tolist(), "labels": tokens.tolist()}
        if packed:
            spans = torch.tensor([length // 2, length - length // 2])
            positions = torch.cat([torch.arange(int(span)) for span in spans])
            row = {"tokens": tokens, "labels": tokens, "input_pos": positions, "seq_lens": spans}
        elif combination.task == "DPO":
            row = job.task.synthetic_row(length)
        self.data = Data(job, [row] * (8192 * job.ranks), packed=packed)
        measures = torch.tensor([[length, length, 400, 0, 1]]).expand(len(self.data.dataset), 5)
        self.data.dataset._measured = RowMeasures(*measures.unbind(1))
        self.trainer = Trainer.load(job, self.data, RandomWeights(job), self.data.sizers())


class RandomWeights(Weights):
    """Weights that no file holds."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def load_weights(self) -> Mapping[str, Any]:
        """Those that the model begins with, but of adapters."""
        torch.manual_seed(0)
        with training.set_default_dtype(self._job.dtype):
            model: torch.nn.Module = config.instantiate(self._job.cfg.model)
        adapters = get_adapter_params(model)
        return {name: part for name, part in model.state_dict().items() if name not in adapters}


class ZeroWeights:
    """Stands for a checkpointer; its weights are zeros that take no memory.

    Args:
        model: block of the model.
        dtype: of the weights.
        should_load_recipe_state: as torchtune's checkpointers take it.
    """

    def __init__(
        self, model: dict[str, Any], dtype: str, should_load_recipe_state: bool = False
    ) -> None:
        assert not should_load_recipe_state
        self._zero = torch.zeros((), dtype=training.get_dtype(dtype, torch.device("cpu")))
        with torch.device("meta"):
            self._model: nn.Module = config.instantiate(OmegaConf.create(model))

    def load_checkpoint(self) -> dict[str, Any]:
        shapes = {name: tensor.shape for name, tensor in self._model.state_dict().items()}
        weights = {name: self._zero.expand(shape) for name, shape in shapes.items()}
        return {training.MODEL_KEY: weights}


class EachSize:
    """A search that tries the sizes it is given, whatever comes of it.

    Attributes:
        tried: what came of each.
        maximum: the largest of them.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._left = list(sizes)
        self.maximum = max(self._left)
        self.tried: list[Trial] = []

    @property
    def candidate(self) -> int | None:
        return self._left[0] if self._left else None

    def record(self, trial: Trial) -> None:
        self._left.pop(0)
        self.tried.append(trial)

    @property
    def best(self) -> int:
        return max((trial.batch_size for trial in self.tried if trial.fits), default=0)


def tried(run: RealRun, sizes: Sequence[int]) -> ProbeResult:
    """Run trials of those sizes as the recipes do."""
    return searched(run, EachSize(sizes))


def searched(run: RealRun, search: Search) -> ProbeResult:
    """Search the longest rows as the recipes do, by a search that no configuration names."""
    finder = LimitFinder(run.job, run.data)
    probe, trainer = run.job.settings.probe, run.trainer
    options = ProbeOptions(probe.device_memory, probe.headroom, finder.most_rows)
    return BoundSearch(
        trainer.tried(),
        SearchScope(
            run.data.trial_rows("longest"),
            accumulates=run.job.settings.search_plan.has_several
            or run.job.settings.gradient_accumulation_steps > 1,
        ),
        options,
        strategy=search,
    ).run()


def found(run: RealRun) -> ProbeResult:
    """Search the longest rows by the recipes' own search."""
    finder = LimitFinder(run.job, run.data)
    with tempfile.TemporaryDirectory() as folder:
        finder.path = Path(folder) / "probe.json"
        *_, result = finder.search_training(run.trainer, length="longest")
    return result


def peaks_on_ranks(
    combinations: Sequence[Combination], sizes: Sequence[int], repeats: int
) -> list[tuple[dict[int, int], ProbeResult]]:
    """Return the peaks of trials on the rank with the largest; called on each of several ranks.

    A thread of gloo's may hold a buffer a little longer than the collective takes, so each size is
    tried several times, and the least counts.
    """
    gc.collect()
    # trials collect garbage, and what is imported need not be looked through every time
    gc.freeze()
    counted = []
    for combination in combinations:
        run = RealRun(combination)
        peaks: dict[int, int] = {}
        for _ in range(repeats):
            result = tried(run, sizes)
            for trial in result.trials:
                assert trial.peak_bytes is not None
                peaks[trial.batch_size] = min(
                    trial.peak_bytes, peaks.get(trial.batch_size, trial.peak_bytes)
                )
        bare = tuple(replace(trial, trace=None) for trial in result.trials)
        counted.append((peaks, replace(result, trials=bare)))
    return counted


class LooksAtValues(nn.Module):
    """A model whose forward depends on what is in its tokens, which fake ones do not have."""

    def __init__(self, **dimensions: Any) -> None:
        super().__init__()
        self.decoder = qwen2(**dimensions)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        largest = tokens.max().item()
        return self.decoder(tokens) * (1 + 0 * largest)


def looks_at_values(**dimensions: Any) -> LooksAtValues:
    """Builds it."""
    return LooksAtValues(**dimensions)

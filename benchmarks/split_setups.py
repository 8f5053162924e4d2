"""Setups of split_check.py: models, batches of 16 rows and losses that a split keeps or changes.

A loss takes the model and a batch, whose keys are attributes here. It returns one loss, or a tuple
of losses whose backwards run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from adaptive_batch import SplitBatch

ROWS = 16


class Setup(NamedTuple):
    """Model, batch and loss of a split.

    Attributes:
        make: function that returns the model.
        batch: function that returns a batch.
        loss: function of the model and a batch.
        arguments: arguments of AdaptiveStep.
        draws: whether the loss draws random numbers, so that gradients are not comparable.
        has_share: whether the loss is multiplied by its share.
        inside: name of the submodule that AdaptiveStep is given; the whole model if empty.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[..., Any]
    arguments: Mapping[str, Any] = {}
    draws: bool = False
    has_share: bool = True
    inside: str = ""


# --- vectors


def vectors() -> dict[str, Any]:
    classes = torch.multinomial(torch.tensor([12.0, 6, 3, 2, 1, 1, 1, 1]), ROWS, replacement=True)
    x = torch.randn(ROWS, 12) * (0.5 + torch.rand(ROWS, 1)) + 0.3 * classes[:, None] / 8
    return {
        "x": x,
        "z": x + 0.3 * torch.randn(ROWS, 12),
        "c": classes,
        "y": torch.randn(ROWS) + x[:, 0],
        "t": (torch.rand(ROWS, 8) < 0.3).float(),
        "q": torch.randn(ROWS, 8).softmax(-1),
        "v": torch.rand(ROWS) < torch.rand(()).clamp(0.3, 0.8),
    }


class Net(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.body, self.head = body, head
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def mlp(*between: nn.Module) -> Net:
    return Net(nn.Sequential(nn.Linear(12, 24), *between, nn.Tanh()), nn.Linear(24, 8))


def dropout_mlp() -> Net:
    return mlp(nn.Dropout(0.3))


def frozen_norm(net: nn.Module) -> nn.Module:
    """Return a net whose batch norms stay in evaluation mode."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.uniform_(-0.3, 0.3)
            module.eval().train = lambda mode=True, module=module: module
    return net


class Experts(nn.Module):
    """A mixture of experts with an auxiliary loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Linear(12, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates = self.gate(x).softmax(-1)
        top = F.one_hot(gates.argmax(-1), 4).to(gates.dtype)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return ((gates * top)[..., None] * outputs).sum(1), 4 * (top.mean(0) * gates.mean(0)).sum()


def of_model(loss: Callable[..., Any], make: Any = mlp, **more: Any) -> Setup:
    return Setup(make, vectors, loss, **more)


def net(loss: Callable[[torch.Tensor, Any], Any], make: Any = mlp, **more: Any) -> Setup:
    """Return a setup of vectors whose loss takes the outputs of the model."""
    return Setup(make, vectors, lambda m, b: loss(m(b.x), b), **more)


def views(loss: Callable[[torch.Tensor, torch.Tensor, Any], Any]) -> Setup:
    """Return a setup whose loss takes embeddings of length 1 of two views of each row."""

    def of_views(m: Any, b: Any) -> torch.Tensor:
        return loss(F.normalize(m(b.x).float(), dim=1), F.normalize(m(b.z).float(), dim=1), b)

    return Setup(mlp, vectors, of_views)


def ce(o: torch.Tensor, b: Any) -> torch.Tensor:
    return F.cross_entropy(o.float(), b.c, reduction="none")


def ce_mean(o: torch.Tensor, b: Any) -> torch.Tensor:
    return ce(o, b).mean()


def errors(o: torch.Tensor, b: Any) -> torch.Tensor:
    return (o[:, 0] - b.y).float().square()


def log_probs(o: torch.Tensor, b: Any) -> torch.Tensor:
    return o.float().log_softmax(-1).gather(1, b.c[:, None])[:, 0]


def one_hot(b: Any) -> torch.Tensor:
    return F.one_hot(b.c, 8).float()


def masked(loss: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (loss * mask).sum() / mask.sum().clamp(min=1)


WEIGHTS = torch.tensor([0.3, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0])


def several(m: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    o = m(b.x)
    return F.cross_entropy(o, b.c), 0.5 * errors(o, b).mean()


def recomputed(m: Any, b: Any, use_reentrant: bool) -> torch.Tensor:
    return ce_mean(
        m.head(checkpoint(m.body, b.x.detach().requires_grad_(), use_reentrant=use_reentrant)), b
    )


def penalized(m: Any, b: Any) -> torch.Tensor:
    x = b.x.clone().requires_grad_()
    o = m(x)
    (slope,) = torch.autograd.grad(o.logsumexp(-1).sum(), x, create_graph=True)
    return F.cross_entropy(o, b.c) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def in_halves(batch: dict[str, Any]) -> SplitBatch:
    """Split a batch of eight chosen rows before eight rejected ones by pairs."""
    half = ROWS // 2

    def part(pairs: Any) -> dict[str, Any]:
        rows = [*pairs, *(half + pair for pair in pairs)]
        return {key: value[rows] for key, value in batch.items()}

    return SplitBatch(half, part)


def dpo(o: torch.Tensor, b: Any) -> torch.Tensor:
    chosen, rejected = (log_probs(o, b) - log_probs(b.q.float().log(), b)).chunk(2)
    return -F.logsigmoid(0.5 * (chosen - rejected)).mean()


def sup_con(one: torch.Tensor, two: torch.Tensor, b: Any) -> torch.Tensor:
    logits, same = one @ two.T / 0.2, (b.c[:, None] == b.c).float()
    return -((logits.log_softmax(1) * same).sum(1) / same.sum(1)).mean()


def kto(o: torch.Tensor, b: Any) -> torch.Tensor:
    gain = log_probs(o, b) - log_probs(b.q.float().log(), b)
    zero = gain.mean().clamp(min=0).detach()
    return (1 - torch.sigmoid(torch.where(b.v, gain - zero, zero - gain))).mean()


# --- images


def images() -> dict[str, torch.Tensor]:
    x = torch.randn(ROWS, 3, 8, 8)
    seg = torch.randint(0, 4, (ROWS, 8, 8))
    ignored = torch.where(torch.rand(ROWS, 8, 8) < torch.rand(ROWS, 1, 1), -100, seg)
    return {"x": x, "c": torch.randint(0, 8, (ROWS,)), "seg": seg, "some": ignored}


def conv(*norm: nn.Module) -> Net:
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), *norm, nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1))
    return Net(body, nn.Sequential(nn.Flatten(), nn.Linear(128, 8)))


def dense() -> Net:
    return Net(nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.GELU()), nn.Conv2d(8, 4, 1))


def dice(o: torch.Tensor, b: Any, over: tuple[int, ...] = (0, 2, 3)) -> torch.Tensor:
    p, hot = o.float().softmax(1), F.one_hot(b.seg, 4).movedim(-1, 1).float()
    return 1 - (2 * (p * hot).sum(over) / (p + hot).sum(over)).mean()


def image(loss: Callable[..., Any], make: Any = conv, **more: Any) -> Setup:
    return Setup(make, images, lambda m, b: loss(m(b.x), b), **more)


# --- texts

VOCABULARY = 40


def texts(labels: str = "lm", mask: bool = True) -> Callable[[], Any]:
    def make() -> dict[str, torch.Tensor]:
        lengths = torch.randint(4, 13, (ROWS, 1))
        used = torch.arange(int(lengths.max())) < lengths
        ids = torch.randint(3, VOCABULARY, used.shape) * used
        batch = {"input_ids": ids, "attention_mask": used.long()}
        prompt = torch.rand(ROWS, 1) * lengths * 0.7
        chosen = torch.rand(used.shape) < 0.4
        chosen[:, 1] = True
        if labels == "lm":
            batch["labels"] = ids.masked_fill(~used | (torch.arange(used.shape[1]) < prompt), -100)
        elif labels == "shifted":
            batch["labels"] = F.pad(ids.masked_fill(~used, -100)[:, 1:], (0, 1), value=-100)
        elif labels == "mlm":
            batch["labels"] = ids.masked_fill(~(used & chosen), -100)
            batch["input_ids"] = ids.masked_fill(used & chosen, 1)
        elif labels == "class":
            batch["labels"] = torch.randint(0, 5, (ROWS,))
        elif labels == "span":
            start = (torch.rand(ROWS) * (lengths[:, 0] - 1)).long()
            batch |= {"start_positions": start, "end_positions": (start + 1)}
        elif labels == "completion":
            batch["completion_mask"] = (used & (torch.arange(used.shape[1]) >= prompt)).long()
            batch["completion_mask"][:, 1] = 1
        elif labels == "target":
            of_target = torch.arange(7) < torch.randint(2, 8, (ROWS, 1))
            of_target[0] = True
            target = torch.randint(3, VOCABULARY, of_target.shape)
            batch["labels"] = target.masked_fill(~of_target, -100)
        if not mask:
            del batch["attention_mask"]
        return batch

    return make


class Encoder(nn.Module):
    """A transformer over tokens: logits `[rows, columns, outputs]`, or of the mean of a row."""

    def __init__(self, outputs: int, causal: bool = False, pooled: bool = False, p: float = 0.0):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(16, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, p, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, outputs)
        self.causal, self.pooled, self.noise = causal, pooled, 0.0

    def forward(self, ids: torch.Tensor, used: torch.Tensor | None = None) -> torch.Tensor:
        columns = torch.arange(ids.shape[1])
        h = self.embed(ids) + self.places(columns)
        if self.noise:
            h = h + self.noise * (torch.rand_like(h) * 2 - 1) / (h.shape[1] * 16) ** 0.5
        hidden = None if used is None else used == 0
        future = columns > columns[:, None] if self.causal else None
        h = self.layers(h, mask=future, src_key_padding_mask=hidden)
        if self.pooled:
            weights = torch.ones_like(ids) if used is None else used
            h = (h * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
        return self.head(h)


def lm_loss(o: torch.Tensor, labels: torch.Tensor, shift: int = 1) -> torch.Tensor:
    o = o[:, : o.shape[1] - shift].float()
    return F.cross_entropy(o.flatten(0, 1), labels[:, shift:].flatten())


def token_losses(o: torch.Tensor, b: Any) -> torch.Tensor:
    losses = F.cross_entropy(o[:, :-1].float().movedim(-1, 1), b.input_ids[:, 1:], reduction="none")
    return losses * b.completion_mask[:, 1:]


def row_means(o: torch.Tensor, b: Any) -> torch.Tensor:
    losses = F.cross_entropy(o[:, :-1].float().mT, b.labels[:, 1:], reduction="none")
    return (losses.sum(1) / (b.labels[:, 1:] >= 0).sum(1).clamp(min=1)).mean()


def spans(o: torch.Tensor, b: Any, hides: bool) -> torch.Tensor:
    o = o.float()
    if hides:
        o = o.masked_fill(b.attention_mask[..., None] == 0, -1e4)
    start, end = o.unbind(-1)
    return (F.cross_entropy(start, b.start_positions) + F.cross_entropy(end, b.end_positions)) / 2


def text(
    loss: Callable[..., Any], labels: str, make: Any, *, mask: bool = True, **more: Any
) -> Setup:
    def of_text(m: Any, b: Any) -> Any:
        return loss(m(b.input_ids, b.attention_mask if mask else None), b)

    return Setup(make, texts(labels, mask), of_text, **more)


def lm(p: float = 0.0) -> Encoder:
    return Encoder(VOCABULARY, causal=True, p=p)


def cut_columns(batch: dict[str, Any]) -> SplitBatch:
    """Split rows, and cut the columns that are padding in all rows of a part."""

    def part(rows: Any) -> dict[str, Any]:
        of_rows = {key: value[list(rows)] for key, value in batch.items()}
        width = int(of_rows["attention_mask"].sum(1).max())
        return {key: v[:, :width] if v.dim() == 2 else v for key, v in of_rows.items()}

    return SplitBatch(ROWS, part)


def grpo(o: torch.Tensor, b: Any) -> torch.Tensor:
    return (token_losses(o, b).sum(1) / b.completion_mask[:, 1:].sum(1).clamp(min=1)).mean()


def completion_tokens(batch: Any) -> torch.Tensor:
    return batch["completion_mask"][:, 1:].sum()


def orpo(o: torch.Tensor, b: Any) -> torch.Tensor:
    losses = token_losses(o, b)
    return losses.sum() / b.completion_mask[:, 1:].sum() + losses.sum(1).sigmoid().mean()


# --- models of Transformers

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
SMALL |= {"intermediate_size": 32, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 32, "num_labels": 5}
SMALL |= {"bos_token_id": 1, "eos_token_id": 2}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 32}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False}
GPT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_labels": 5}
SEQ = {"vocab_size": VOCABULARY, "d_model": 16, "decoder_start_token_id": 0, "pad_token_id": 0}
SEQ |= {"bos_token_id": 1, "eos_token_id": 2, "dropout": 0.0, "tie_word_embeddings": False}
SEQ |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
SEQ |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
T5 = SEQ | {"d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
VISION = SMALL | QUIET | {"image_size": 8, "patch_size": 4}
FORMER = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
FORMER |= {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2]}
FORMER |= {"mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 4}
FORMER |= {"classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}


def hf(
    model: str, config: str, batch: Any, more: Any = (), checkpoints: Any = None, **k: Any
) -> Setup:
    """Return a setup of a model of Transformers with its own loss."""

    def make() -> nn.Module:
        settings = getattr(tf, f"{config}Config")(**dict(more))
        net = getattr(tf, f"{config}{model}")(settings)
        if checkpoints is not None:
            net.gradient_checkpointing_enable({"use_reentrant": checkpoints})
        return frozen_norm(net.train())

    return Setup(make, batch, lambda m, b: m(**vars(b)).loss, **k)


def pictures(segments: bool = False) -> Callable[[], dict[str, torch.Tensor]]:
    def make() -> dict[str, torch.Tensor]:
        labels = torch.randint(0, 4, (ROWS, 16, 16) if segments else (ROWS,))
        return {
            "pixel_values": torch.randn(ROWS, 3, *([16, 16] if segments else [8, 8])),
            "labels": labels,
        }

    return make


def ignored_pictures() -> dict[str, torch.Tensor]:
    batch = pictures(segments=True)()
    batch["labels"][torch.rand(ROWS, 16, 16) < torch.rand(ROWS, 1, 1)] = 255
    return batch


def sounds() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(ROWS, 8, 20), "labels": texts("lm")()["labels"]}


# --- random losses


class Random(nn.Module):
    """Layers that draw numbers in training: dropped paths, a latent, a masked autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(12, 12)

    def paths(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x).tanh()
        kept = (torch.rand(len(x), 1) < 0.8).to(h.dtype) / 0.8
        return self.head((h + kept * self.two(h).tanh())[:, :12])

    def masked(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.rand(x.shape).argsort(1) < 6
        rebuilt = self.head(self.one(x.masked_fill(hidden, 0)).tanh()[:, :12])
        return ((rebuilt - x).square() * hidden).sum() / hidden.sum()

    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.one(x + 0.5 * torch.randn_like(x)).tanh()[:, :12])

    def numpy(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.as_tensor(np.random.default_rng().normal(size=x.shape), dtype=x.dtype)
        return F.mse_loss(self.head(self.one(x + noise).tanh()[:, :12]), noise)


def random(loss: Callable[[Random, torch.Tensor], torch.Tensor]) -> Setup:
    return Setup(Random, vectors, lambda m, b: loss(m, b.x), draws=True)


def noisy_lm(m: Any, b: Any) -> torch.Tensor:
    m.noise = 5.0
    return lm_loss(m(b.input_ids, b.attention_mask), b.labels)


# --- losses that a split keeps

CORRECT: dict[str, Setup] = {
    "mse": net(lambda o, b: F.mse_loss(o[:, 0], b.y)),
    "classes": net(lambda o, b: F.cross_entropy(o, b.c)),
    "multi-label": net(
        lambda o, b: F.binary_cross_entropy_with_logits(o, b.t, pos_weight=WEIGHTS.to(o.dtype))
    ),
    "distillation": net(
        lambda o, b: (
            ce_mean(o, b) + 4 * F.kl_div((o / 2).log_softmax(-1), b.q, reduction="batchmean")
        )
    ),
    "class weights, counted": net(
        lambda o, b: F.cross_entropy(o, b.c, weight=WEIGHTS.to(o.dtype)),
        arguments={"num_labels": lambda batch: WEIGHTS[batch["c"]].sum()},
    ),
    "valid rows, counted": net(
        lambda o, b: masked(errors(o, b), b.v), arguments={"num_labels": lambda b: b["v"].sum()}
    ),
    "a sum": net(lambda o, b: ce(o, b).sum(), has_share=False),
    "two denominators, summed": of_model(
        lambda m, b, sums: (ce(m(b.x), b) * b.v).sum() / sums["v"] + errors(m(b.x), b).sum() / ROWS,
        arguments={"statistics": lambda part: {"v": part.batch["v"].sum().float()}},
        has_share=False,
    ),
    "dropout": net(ce_mean, dropout_mlp, draws=True),
    "checkpoint, dropout": of_model(
        partial(recomputed, use_reentrant=False), dropout_mlp, draws=True
    ),
    "tied weights": of_model(
        lambda m, b: F.mse_loss(m.body(b.x) @ m.body[0].weight, b.x) + ce(m(b.x), b).mean()
    ),
    "two backwards": of_model(several),
    "head outside": of_model(lambda m, b: sum(several(m, b)), inside="body"),
    "gradient penalty": of_model(penalized),
    "pairs, split by pairs": net(dpo, arguments={"split": in_halves}),
    "group norm": image(ce_mean, lambda: conv(nn.GroupNorm(2, 8))),
    "frozen batch norm, images": image(ce_mean, lambda: frozen_norm(conv(nn.BatchNorm2d(8)))),
    "segmentation, counted": image(
        lambda o, b: F.cross_entropy(o, b.some),
        dense,
        arguments={"num_labels": lambda batch: (batch["some"] >= 0).sum()},
    ),
    "dice in rows": image(lambda o, b: dice(o, b, over=(2, 3)), dense),
    "causal lm": text(lambda o, b: lm_loss(o, b.labels), "lm", lm),
    "causal lm, dropout": text(
        lambda o, b: lm_loss(o, b.labels), "lm", lambda: lm(0.1), draws=True
    ),
    "labels shifted by collate": text(lambda o, b: lm_loss(o, b.labels, 0), "shifted", lm),
    "masked lm": text(lambda o, b: lm_loss(o, b.labels, 0), "mlm", lambda: Encoder(VOCABULARY)),
    "texts": text(
        lambda o, b: F.cross_entropy(o, b.labels), "class", lambda: Encoder(5, pooled=True)
    ),
    "spans, padding hidden": text(lambda o, b: spans(o, b, True), "span", lambda: Encoder(2)),
    "spans over padding": text(lambda o, b: spans(o, b, False), "span", lambda: Encoder(2)),
    "grpo": text(grpo, "completion", lm),
    "tokens of completions, counted": text(
        lambda o, b: masked(token_losses(o, b), b.completion_mask[:, 1:]),
        "completion",
        lm,
        arguments={"num_labels": completion_tokens},
    ),
    "BERT": hf("ForSequenceClassification", "Bert", texts("class"), SMALL | QUIET),
    "BERT, dropout": hf("ForSequenceClassification", "Bert", texts("class"), SMALL, draws=True),
    "BERT, masked lm": hf("ForMaskedLM", "Bert", texts("mlm"), SMALL | QUIET),
    "BERT, spans": hf(
        "ForQuestionAnswering", "Bert", texts("span"), SMALL | QUIET | {"num_labels": 2}
    ),
    "GPT-2": hf("LMHeadModel", "GPT2", texts("lm"), GPT),
    "Llama": hf("ForCausalLM", "Llama", texts("lm"), SMALL),
    "Llama, checkpoint": hf("ForCausalLM", "Llama", texts("lm"), SMALL, checkpoints=False),
    "T5": hf("ForConditionalGeneration", "T5", texts("target"), T5),
    "Whisper": hf(
        "ForConditionalGeneration",
        "Whisper",
        sounds,
        SEQ | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32},
    ),
    "ViT": hf("ForImageClassification", "ViT", pictures(), VISION | {"num_labels": 4}),
    "Mixtral": hf("ForCausalLM", "Mixtral", texts("lm"), SMALL | MOE),
    "dropped paths": random(lambda m, x: F.mse_loss(m.paths(x), x)),
    "masked autoencoder": random(Random.masked),
    "noise of numpy": random(Random.numpy),
    "noise in embeddings": Setup(lm, texts("lm"), noisy_lm, draws=True),
}

# --- losses that a split changes

WRONG: dict[str, Setup] = {
    "class weights": net(lambda o, b: F.cross_entropy(o, b.c, weight=WEIGHTS.to(o.dtype))),
    "positives alone": net(lambda o, b: masked(ce(o, b), b.c > 0)),
    "valid rows alone": net(lambda o, b: masked(errors(o, b), b.v)),
    "valid pixels alone": image(lambda o, b: F.cross_entropy(o, b.some), dense),
    "two denominators": net(lambda o, b: errors(o, b).mean() + masked(ce(o, b), b.v)),
    "orpo": text(orpo, "completion", lm),
    "kto": net(kto),
    "info nce": views(
        lambda one, two, b: F.cross_entropy(one @ two.T / 0.2, torch.arange(len(one)))
    ),
    "supervised contrastive": views(sup_con),
    "hardest rows": net(lambda o, b: ce(o, b).topk(len(o) // 4).values.mean()),
    "variance": net(lambda o, b: errors(o, b).mean() - 0.1 * o[:, 0].float().var()),
    "log of the mean": net(lambda o, b: errors(o, b).mean().log()),
    "rmse": net(lambda o, b: errors(o, b).mean().sqrt()),
    "experts, 0.01": net(lambda o, b: ce_mean(o[0], b) + 0.01 * o[1], Experts),
    "dice": image(dice, dense),
    "batch statistics": net(ce_mean, lambda: mlp(nn.BatchNorm1d(24, track_running_stats=False))),
    "a sum with its share": net(lambda o, b: ce(o, b).sum()),
    "a mean without share": net(ce_mean, has_share=False),
    "mean of token means": text(
        lambda o, b: masked(token_losses(o, b), b.completion_mask[:, 1:]), "completion", lm
    ),
    "mean of rows beside labels": text(row_means, "lm", lm),
    "spans, cut by split=": text(
        lambda o, b: spans(o, b, False),
        "span",
        lambda: Encoder(2),
        arguments={"split": cut_columns},
    ),
    "pairs, split by rows": net(dpo),
    "noisy class weights": of_model(
        lambda m, b: F.cross_entropy(m.noisy(b.x)[:, :8].float(), b.c, weight=WEIGHTS),
        Random,
        draws=True,
    ),
    "SegFormer, 255 ignored": hf("ForSemanticSegmentation", "Segformer", ignored_pictures, FORMER),
    "Mixtral, auxiliary loss": hf(
        "ForCausalLM",
        "Mixtral",
        texts("lm"),
        SMALL | MOE | {"output_router_logits": True, "router_aux_loss_coef": 0.1},
    ),
}

"""The demo's base model: a small Qwen2 with random weights and a tokenizer trained on the demo's
data.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .data import DATA_FILES, SEED, read_rows, write_data, write_pairs

if TYPE_CHECKING:
    import torch
    from torchtune.models.qwen2 import Qwen2Tokenizer
    from torchtune.modules import TransformerDecoder

# The sizes of the base model; configs/demo_cpu.yaml gives the same ones to
# torchtune.models.qwen2.qwen2.
MODEL = {
    "vocab_size": 2048,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 128,
    "intermediate_dim": 384,
    "max_seq_len": 192,
    "norm_eps": 1e-6,
    "rope_base": 1_000_000.0,
    "tie_word_embeddings": True,
}
# Qwen2's own standard deviation for a fresh model; torch's default of 1 for embeddings would start
# at a loss of 60.
INITIALIZER_RANGE = 0.02

END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen2's pre-tokenizer, which torchtune has built in: a tokenizer for it must be trained on the
# same pieces.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Chat format of torchtune's Qwen2 tokenizer, for transformers.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BASE_FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
)


def prepare(directory: str | Path, *, num_rows: int | None = None) -> None:
    """Make the demo's data and base checkpoint in ``directory``; keep what exists.

    Each of the two folders is written under a temporary name and renamed, so an interrupted call
    leaves no incomplete folder, and two processes may call at once.

    Args:
        directory: made if it does not exist.
        num_rows: how many docstrings to use; ``None`` is all that the split needs.

    Raises:
        RuntimeError: the standard library has no readable sources, or a folder that exists is
            incomplete.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / "data"

    def texts() -> Iterator[str]:
        for row in read_rows(data / "train.jsonl"):
            yield row["signature"]
            yield row["docstring"]

    make_once(data, DATA_FILES, lambda folder: write_data(folder, num_rows=num_rows))
    make_once(directory / "base", BASE_FILES, lambda folder: write_base(folder, texts()))
    if json.loads((directory / "base" / "config.json").read_text(encoding="utf-8")) != _hf_config():
        raise RuntimeError(
            f"{directory / 'base'} was made for another version of the demo: remove it, and run"
            " again"
        )


def write_pairs_once(directory: str | Path) -> None:
    """Make the demo's preference pairs in ``directory``, of the data there; keep what exists."""
    directory = Path(directory)
    make_once(
        directory / "pairs", DATA_FILES, lambda folder: write_pairs(directory / "data", folder)
    )


def make_once(folder: Path, names: tuple[str, ...], write: Callable[[Path], None]) -> None:
    """Call ``write`` on a temporary folder and rename it to ``folder``, unless ``folder`` exists.

    Args:
        folder: complete or absent, whatever interrupts.
        names: the files that it must hold.
        write: fills the empty folder that it is given.

    Raises:
        RuntimeError: ``folder`` exists and lacks one of ``names``.
    """
    if not folder.exists():
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            made = Path(temporary) / folder.name
            made.mkdir()
            write(made)
            try:
                made.rename(folder)
            except OSError:  # another process was first
                if not folder.exists():
                    raise
        print(f"demo: made {folder} in {time.perf_counter() - started:.1f} s", flush=True)
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise RuntimeError(
            f"{folder} lacks {', '.join(missing)}: remove the folder, and it is made again"
        )


def write_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """Train a byte-level BPE tokenizer and write it in the files that torchtune and transformers
    read.

    The last ids of the vocabulary are the special tokens; they are in tokenizer.json alone, as with
    Qwen2.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"] - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.model.save(str(folder))  # vocab.json and merges.txt
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MODEL["max_seq_len"],
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_base(folder: Path, texts: Iterable[str]) -> None:
    """Write the base checkpoint with its tokenizer into an empty folder; the same bytes for the
    same texts.
    """
    import torch
    from safetensors.torch import save_file
    from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf

    write_tokenizer(folder, texts)
    special_ids = {
        token["content"]: token["id"]
        for token in json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))[
            "added_tokens"
        ]
    }
    _write_json(folder / "config.json", _hf_config())
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": None,
            "eos_token_id": [special_ids[IM_END], special_ids[END_OF_TEXT]],
            "pad_token_id": special_ids[END_OF_TEXT],
        },
    )

    generator = torch.Generator().manual_seed(SEED)
    weights = build_model().state_dict()
    for name, weight in weights.items():
        if name.endswith(".scale"):
            weight.fill_(1)
        elif name.endswith(".bias"):
            weight.zero_()
        else:
            weight.normal_(0, INITIALIZER_RANGE, generator=generator)
    save_file(qwen2_tune_to_hf(weights), folder / "model.safetensors", metadata={"format": "pt"})


def _hf_config() -> dict[str, Any]:
    """Return config.json of the base: what torchtune's conversion and transformers' Qwen2 need."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "float32",
        "vocab_size": MODEL["vocab_size"],
        "hidden_size": MODEL["embed_dim"],
        "intermediate_size": MODEL["intermediate_dim"],
        "num_hidden_layers": MODEL["num_layers"],
        "num_attention_heads": MODEL["num_heads"],
        "num_key_value_heads": MODEL["num_kv_heads"],
        "max_position_embeddings": MODEL["max_seq_len"],
        "rms_norm_eps": MODEL["norm_eps"],
        "rope_theta": MODEL["rope_base"],
        "tie_word_embeddings": MODEL["tie_word_embeddings"],
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": INITIALIZER_RANGE,
        "use_sliding_window": False,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def build_model() -> TransformerDecoder:
    """Return the demo's model, its weights not yet loaded."""
    from torchtune.models.qwen2 import qwen2

    return qwen2(**MODEL)


def load(folder: Path) -> TransformerDecoder:
    """Return the demo's model with the weights of a folder in Hugging Face's format."""
    from safetensors.torch import load_file
    from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune

    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        weights |= load_file(path)
    model = build_model()
    model.load_state_dict(
        qwen2_hf_to_tune(weights, tie_word_embeddings=bool(MODEL["tie_word_embeddings"]))
    )
    return model.eval()


def held_out_loss(model: TransformerDecoder, rows: list[dict[str, Any]], *, pad_id: int) -> float:
    """Return the mean cross-entropy over all label tokens of tokenized rows.

    Args:
        model: gives logits of shape [batch, sequence, vocabulary].
        rows: with ``tokens`` and ``labels`` as torchtune's datasets give them.
        pad_id: the token that fills the shorter rows of a batch.
    """
    import torch
    from torchtune.data import padded_collate_sft

    total, num_labels, batch_size = 0.0, 0, 16
    for start in range(0, len(rows), batch_size):
        batch = padded_collate_sft(rows[start : start + batch_size], padding_idx=pad_id)
        logits = model(batch["tokens"])[:, :-1].flatten(0, 1).float()
        labels = batch["labels"][:, 1:].flatten()
        total += torch.nn.functional.cross_entropy(
            logits, labels, ignore_index=-100, reduction="sum"
        ).item()
        num_labels += int((labels != -100).sum())
    return total / num_labels


def answer_log_probs(
    model: TransformerDecoder, pairs: list[dict[str, Any]], *, pad_id: int
) -> torch.Tensor:
    """Return the log probability of each answer, summed over its tokens: [2, pairs], the chosen
    answers first.

    Args:
        model: model with logits of shape [batch, sequence, vocabulary].
        pairs: tokenized pairs, as torchtune's datasets of preferences give them.
        pad_id: the token that fills the shorter answers of a batch.
    """
    import torch
    from torchtune.data import padded_collate_dpo
    from torchtune.rlhf import get_batch_log_probs

    log_probs = []
    for pair in pairs:
        tokens, labels = padded_collate_dpo([pair], padding_idx=pad_id)
        log_probs.append(get_batch_log_probs(model(tokens), labels))
    return torch.stack(log_probs, dim=1)


def sample(
    model: TransformerDecoder, tokenizer: Qwen2Tokenizer, prompt: str, *, max_new_tokens: int = 64
) -> str:
    """Generate a text for a signature with a fixed seed."""
    import torch
    from torchtune.data import Message
    from torchtune.generation import generate

    messages = [Message(role="user", content=prompt), Message(role="assistant", content="")]
    tokens, _ = tokenizer.tokenize_messages(messages, add_eos=False)
    generated, _ = generate(
        model,
        torch.tensor(tokens),
        max_generated_tokens=max_new_tokens,
        pad_id=tokenizer.pad_id,
        temperature=0.5,
        top_k=20,
        stop_tokens=tokenizer.stop_tokens,
        rng=torch.Generator().manual_seed(SEED),
    )
    return tokenizer.decode(generated[0].tolist()[len(tokens) :], skip_special_tokens=True)

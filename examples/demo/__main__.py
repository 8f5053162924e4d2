"""The demo: makes a small task from the Python that is installed, and runs the real recipe on it.

    python examples/demo [--directory DIR] [--files-only | --lora] [key=value ...]

No file is downloaded. In DIR it makes, once:

    data/   train.jsonl, held_out.jsonl: the standard library's docstrings, signature -> docstring
    base/   a Qwen2 checkpoint in Hugging Face's format, with random weights, and the byte-level
            BPE tokenizer that was trained on the data; torchtune and transformers both load it

Then it trains with ``configs/demo_cpu.yaml`` and compares the tuned model with the base. With
``--lora`` that model is the base, and adapters learn the way back: docstring -> signature.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

# `python examples/demo` runs this file outside its package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import demo

if TYPE_CHECKING:
    from omegaconf import DictConfig

EXAMPLES = Path(__file__).resolve().parents[1]
PROMPT = "def string.join_lines(lines, separator='\\n')"
PROMPT_BACK = "Return the lines, joined by the separator."


def main() -> None:
    """Make the files, train on them with `tune run`, then compare the tuned model with the base."""
    parser = argparse.ArgumentParser(
        prog="python examples/demo", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--directory", default=demo.DIRECTORY, help="where everything goes (default: %(default)s)"
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--files-only", action="store_true", help="make data and base model, and train nothing"
    )
    either.add_argument(
        "--lora", action="store_true", help="train adapters on the model that the demo has tuned"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="passed on to tune run, after the demo's own",
    )
    arguments = parser.parse_args()
    if "=" in arguments.directory:
        parser.error("--directory must not contain '=': tune run could not pass it on")

    recipe = "adaptive_full_finetune"
    prompt = PROMPT
    own = [
        "batch_increase_function=demo.grow",
        f"output_dir={Path(arguments.directory) / 'tuned'}",
        # It is the demo's own folder: one that was interrupted begins again.
        "overwrite_output_dir=True",
    ]
    if arguments.lora:
        recipe = "adaptive_lora_finetune"
        prompt = PROMPT_BACK
        own = _of_adapters(Path(arguments.directory))
    settings = [
        f"demo_dir={arguments.directory}",
        "use_maximum_batch_size=True",
        *own,
        *arguments.overrides,
    ]
    started = time.perf_counter()
    cfg = _resolved(settings)
    demo.prepare(cfg.demo_dir)
    if arguments.files_only:
        return

    command = ["tune", "run", recipe, "--config", "demo_cpu", *settings]
    path = os.pathsep.join(
        filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH")))
    )  # demo.grow is found there
    print(
        f"$ PYTHONPATH={shlex.quote(os.path.relpath(EXAMPLES))} {shlex.join(command)}", flush=True
    )
    finished = subprocess.run(
        [_installed("tune"), *command[1:]], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    if finished.returncode:
        sys.exit(finished.returncode)

    print_epochs(Path(cfg.output_dir) / "adaptive_batch" / "run.jsonl")
    compare(cfg, Path(cfg.output_dir) / f"epoch_{cfg.epochs - 1}", prompt)
    print(f"\n{time.perf_counter() - started:.0f} s in all. Everything is in {cfg.demo_dir}.\n")
    print(next_steps(arguments.directory, Path(cfg.output_dir)))


def _of_adapters(directory: Path) -> list[str]:
    """Return the settings of adapters on the tuned model, which learn from the same rows the other
    way round.
    """
    base = directory / "tuned" / "epoch_2"
    weights = sorted(path.name for path in base.glob("model*.safetensors"))
    if not weights:
        sys.exit(
            f"there is no tuned model in {base}: `make demo` makes it, or this command without"
            " --lora"
        )
    return [
        "model._component_=torchtune.models.qwen2.lora_qwen2",
        "model.lora_attn_modules=[q_proj,k_proj,v_proj,output_proj]",
        "model.apply_lora_to_mlp=True",
        "model.lora_rank=16",
        "model.lora_alpha=32",
        f"checkpointer.checkpoint_dir={base}",
        f"checkpointer.checkpoint_files=[{','.join(weights)}]",
        "dataset.column_map.input=docstring",
        "dataset.column_map.output=signature",
        "epochs=1",
        f"output_dir={directory / 'adapters'}",
        "overwrite_output_dir=True",
    ]


def next_steps(directory: str, output_dir: Path) -> str:
    """Return the commands that a user may go on with, each as it can be typed where the demo was
    started.
    """
    tune, python = (shlex.quote(_shortest(path)) for path in (_installed("tune"), sys.executable))
    where = "" if directory == demo.DIRECTORY else f" {shlex.quote(f'demo_dir={directory}')}"
    commands = {
        "the search alone, for two lengths": (
            f'{tune} run adaptive_probe --config demo_cpu{where} "probe.sequence_lengths=[64,128]"'
        ),
        "the run as a page": f"{python} -m adaptive_batch report {shlex.quote(str(output_dir))}",
        'a config of your own (README, "Your own config in five minutes")': (
            f"{tune} cp qwen2/0.5B_full_single_device my_qwen2.yaml"
        ),
    }
    return "\n".join(["Next:", *(f"  # {what}\n  {command}" for what, command in commands.items())])


def _shortest(path: str) -> str:
    """Return a path from here, or whole where that is shorter."""
    return min(os.path.relpath(path), path, key=len)


def _resolved(settings: list[str]) -> DictConfig:
    """Return demo_cpu.yaml with the command's settings."""
    from omegaconf import OmegaConf

    from adaptive_batch.config_files import config_path

    path = config_path("demo_cpu")
    assert path is not None, "demo_cpu.yaml is shipped with adaptive_batch"
    values = [setting for setting in settings if "=" in setting and not setting.startswith("~")]
    return OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(values))


def _installed(command: str) -> str:
    """Return the path of a command that was installed with this Python, on PATH or not."""
    scripts = os.pathsep.join([str(Path(sys.executable).parent), sysconfig.get_path("scripts")])
    found = shutil.which(command, path=scripts) or shutil.which(command)
    if found is None:
        sys.exit(f"{command} is not installed: adaptive-batch check prints what is wrong")
    return found


def print_epochs(record: Path) -> None:
    """Print batch size, steps and mean loss of each epoch of the latest run in a run.jsonl."""
    from adaptive_batch.report import read_records

    epochs: dict[int, list[dict[str, Any]]] = {}
    for entry in read_records(record):
        if entry["kind"] == "start":
            epochs.clear()
        elif entry["kind"] == "step":
            epochs.setdefault(entry["epoch"], []).append(entry)
    print("\nepoch  batch size  steps  mean loss")
    for epoch, steps in epochs.items():
        mean_loss = sum(step["loss"] for step in steps) / len(steps)
        print(f"{epoch:>5}  {steps[0]['batch_size']:>10}  {len(steps):>5}  {mean_loss:>9.3f}")


def compare(cfg: DictConfig, tuned: Path, prompt: str) -> None:
    """Print the loss of base and tuned model on the held-out rows, and what each writes for a
    prompt.
    """
    import torch
    from torchtune import config

    directory = Path(cfg.demo_dir)
    tokenizer = config.instantiate(cfg.tokenizer)
    held_out = directory / "data" / "held_out.jsonl"
    dataset = config.instantiate(cfg.dataset, tokenizer, data_files=str(held_out))
    rows = [dataset[index] for index in range(len(dataset))]

    losses: dict[str, float] = {}
    print(f"\nprompt: {prompt}")
    for name, folder in (("base", Path(cfg.checkpointer.checkpoint_dir)), ("tuned", tuned)):
        model = demo.load(folder)
        with torch.inference_mode():
            losses[name] = demo.held_out_loss(model, rows, pad_id=tokenizer.pad_id)
            text = demo.sample(model, tokenizer, prompt)
        print(f"\n{name} ({folder}):")
        print("\n".join(f"    {line}" for line in text.splitlines()))
    print(
        f"\nmean loss per token on {len(rows)} held-out rows: "
        + ", ".join(f"{n} {v:.3f}" for n, v in losses.items())
    )


if __name__ == "__main__":
    main()

"""Demo: create a small task from the installed Python, and run the real recipe on it.

    python examples/demo [--directory DIR] [--files-only | --lora | --dpo] [key=value ...]

The demo downloads nothing. On the first run it creates in DIR:

    data/   train.jsonl, held_out.jsonl: the standard library's docstrings, signature -> docstring
    base/   a Qwen2 checkpoint in Hugging Face's format, with random weights, and the byte-level
            BPE tokenizer that was trained on the data; torchtune and transformers both load it

Then it trains with ``configs/demo_cpu.yaml``: the largest batch that fits, a growth function, the
fastest micro-batch layout, and a learning rate that scales with the batch. It plots the run and
compares the tuned model with the base model. ``--lora`` trains adapters on the tuned model for the
reverse task, docstring -> signature. ``--dpo`` trains adapters on preference pairs, in which the
first sentence of a docstring is preferred to the whole docstring.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING

# `python examples/demo` runs this file outside its package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import demo

if TYPE_CHECKING:
    from omegaconf import DictConfig

EXAMPLES = Path(__file__).resolve().parents[1]
PROMPT = "def string.join_lines(lines, separator='\\n')"
PROMPT_BACK = "Return the lines, joined by the separator."
# Characters to show of a generated text.
SHOWN_CHARACTERS = 100
# DPOLoss's default.
BETA = 0.1
# Lines that repeat later output, or that other packages print. A progress line is shown at the end
# of its epoch.
PASSED_OVER = re.compile(
    r"trial \d|timed |counting tokens|Writing logs|starting with|the configuration is"
    r"|epoch \d saved|Skipping import|\s+Please see|Generating"
    r"|\d+\|\d+\|Loss: [\d.]+: (\d+) of (?!\1 )"
)


def main() -> None:
    """Create the files, train with `tune run`, and compare the tuned model with the base model."""
    parser = argparse.ArgumentParser(
        prog="python examples/demo", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--directory", default=demo.DIRECTORY, help="folder of all files (default: %(default)s)"
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
    either.add_argument(
        "--dpo", action="store_true", help="train preferences on the model that the demo has tuned"
    )
    arguments = parser.parse_args()
    if "=" in arguments.directory:
        parser.error("--directory must not contain '=': tune run could not pass it on")

    recipe = "adaptive_full_finetune"
    prompt = PROMPT
    own = [
        "batch_increase_function=demo.grow",
        "micro_batch_tokens=auto",
        "lr_scaling=sqrt",
        # The configured learning rate was chosen for the batch of the first epoch.
        "reference_batch_size=16",
        f"output_dir={Path(arguments.directory) / 'tuned'}",
        # The folder belongs to the demo: an interrupted demo starts again.
        "overwrite_output_dir=True",
    ]
    if arguments.lora:
        recipe = "adaptive_lora_finetune"
        prompt = PROMPT_BACK
        own = _of_adapters(Path(arguments.directory))
    if arguments.dpo:
        recipe = "adaptive_dpo"
        own = _of_preferences(Path(arguments.directory))
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
    if arguments.dpo:
        demo.write_pairs_once(cfg.demo_dir)

    command = ["tune", "run", recipe, "--config", "demo_cpu", *settings]
    path = os.pathsep.join(
        filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH")))
    )  # demo.grow is found there
    print(
        f"$ PYTHONPATH={shlex.quote(os.path.relpath(EXAMPLES))} {shlex.join(command)}", flush=True
    )
    printed = Path(cfg.demo_dir) / f"{Path(cfg.output_dir).name}.log"
    minutes = "a minute" if arguments.dpo else "two to five minutes"
    print(f"This takes about {minutes} on two cores. All that it prints is in {printed}.\n")
    status = run_and_show([_installed("tune"), *command[1:]], {"PYTHONPATH": path}, printed)
    if status:
        sys.exit(status)

    from adaptive_batch import write_report

    page, *_ = write_report(cfg.output_dir)
    print(f"the run as a page: {page}\n")
    tuned = Path(cfg.output_dir) / f"epoch_{cfg.epochs - 1}"
    if arguments.dpo:
        compare_preferences(cfg, tuned)
    else:
        compare(cfg, tuned, prompt)
    print(f"\n{time.perf_counter() - started:.0f} s in all. Everything is in {cfg.demo_dir}. Next:")
    print(next_steps(arguments.directory, Path(cfg.output_dir)))


def _of_adapters(directory: Path) -> list[str]:
    """Return the settings of adapters on the tuned model, which learn to generate the signature
    from the docstring.
    """
    return [
        *_adapters_on_tuned(directory),
        "dataset.column_map.input=docstring",
        "dataset.column_map.output=signature",
        "epochs=1",
        f"output_dir={directory / 'adapters'}",
        "overwrite_output_dir=True",
    ]


def _of_preferences(directory: Path) -> list[str]:
    """Return the settings of adapters on the tuned model, which learn from preference pairs."""
    return [
        *_adapters_on_tuned(directory),
        "loss=torchtune.rlhf.loss.DPOLoss",
        "dataset._component_=torchtune.datasets.preference_dataset",
        f"dataset.data_files={directory / 'pairs' / 'train.jsonl'}",
        # preference_dataset has neither key.
        "~dataset.packed",
        "~dataset.column_map",
        "micro_batch_tokens=auto",
        "optimizer.lr=3e-4",
        "epochs=1",
        "max_steps_per_epoch=64",
        f"output_dir={directory / 'preferences'}",
        "overwrite_output_dir=True",
    ]


def _adapters_on_tuned(directory: Path) -> list[str]:
    """Return the settings of adapters on the model that the demo has tuned."""
    base = directory / "tuned" / "epoch_2"
    weights = sorted(path.name for path in base.glob("model*.safetensors"))
    if not weights:
        sys.exit(
            f"{base} has no tuned model: create it with `make demo`, or with this command without"
            " --lora and --dpo"
        )
    return [
        "model._component_=torchtune.models.qwen2.lora_qwen2",
        "model.lora_attn_modules=[q_proj,k_proj,v_proj,output_proj]",
        "model.apply_lora_to_mlp=True",
        "model.lora_rank=16",
        "model.lora_alpha=32",
        f"checkpointer.checkpoint_dir={base}",
        f"checkpointer.checkpoint_files=[{','.join(weights)}]",
    ]


def run_and_show(command: list[str], environment: dict[str, str], printed: Path) -> int:
    """Run a command, write its output to a file, and show the relevant lines, or all lines if it
    fails; return its exit status.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
    )
    assert process.stdout is not None, "it is a pipe"
    with printed.open("w", buffering=1, encoding="utf-8") as file:
        for line in process.stdout:
            file.write(line)
            if line.strip() and not PASSED_OVER.match(line):
                print(line, end="", flush=True)
    if process.wait():
        print(printed.read_text(encoding="utf-8"), file=sys.stderr)
    return process.returncode


def next_steps(directory: str, output_dir: Path) -> str:
    """Return commands for the user to run next, with paths relative to the current folder."""
    tune = shlex.quote(_shortest(_installed("tune")))
    ours = shlex.quote(_shortest(_installed("adaptive-batch")))
    where = "" if directory == demo.DIRECTORY else f" {shlex.quote(f'demo_dir={directory}')}"
    commands = {
        "the search alone": (
            f'{tune} run adaptive_probe --config demo_cpu{where} "probe.sequence_lengths=[64,128]"'
        ),
        "each row once an epoch": f"{ours} audit {shlex.quote(str(output_dir))}",
        "your own config, as docs/torchtune.md says": (
            f"{tune} cp qwen2/0.5B_full_single_device my_qwen2.yaml"
        ),
    }
    return "\n".join(f"  {command}  # {what}" for what, command in commands.items())


def _shortest(path: str) -> str:
    """Return the shorter of the relative and the absolute path."""
    return min(os.path.relpath(path), path, key=len)


def _resolved(settings: list[str]) -> DictConfig:
    """Return demo_cpu.yaml with the command's settings."""
    from omegaconf import OmegaConf

    from adaptive_batch.config_files import config_files

    values = [setting for setting in settings if "=" in setting and not setting.startswith("~")]
    cfg = OmegaConf.merge(
        OmegaConf.load(config_files()["demo_cpu"]), OmegaConf.from_dotlist(values)
    )
    for setting in settings:
        if setting.startswith("~"):
            block, _, key = setting.removeprefix("~").rpartition(".")
            OmegaConf.select(cfg, block).pop(key)
    return cfg


def _installed(command: str) -> str:
    """Return the path of a command that was installed with this Python, on PATH or not."""
    scripts = os.pathsep.join([str(Path(sys.executable).parent), sysconfig.get_path("scripts")])
    found = shutil.which(command, path=scripts) or shutil.which(command)
    if found is None:
        sys.exit(f"{command} is not installed: python -m adaptive_batch check reports the reason")
    return found


def compare(cfg: DictConfig, tuned: Path, prompt: str) -> None:
    """Print the held-out loss of the base and the tuned model, and a text that each generates."""
    import torch
    from torchtune import config

    directory = Path(cfg.demo_dir)
    tokenizer = config.instantiate(cfg.tokenizer)
    held_out = directory / "data" / "held_out.jsonl"
    dataset = config.instantiate(cfg.dataset, tokenizer, data_files=str(held_out))
    rows = [dataset[index] for index in range(len(dataset))]

    losses: dict[str, float] = {}
    print(f"prompt: {prompt}")
    for name, folder in (("base", Path(cfg.checkpointer.checkpoint_dir)), ("tuned", tuned)):
        model = demo.load(folder)
        with torch.inference_mode():
            losses[name] = demo.held_out_loss(model, rows, pad_id=tokenizer.pad_id)
            text = demo.sample(model, tokenizer, prompt)
        print(f"{name:<6} {' '.join(text.split())[:SHOWN_CHARACTERS]}")
    print(
        f"mean loss per token on {len(rows)} held-out rows: "
        + ", ".join(f"{n} {v:.3f}" for n, v in losses.items())
    )


def compare_preferences(cfg: DictConfig, tuned: Path) -> None:
    """Print the rewards of base and tuned model on held-out pairs.

    The base is the reference, so its rewards are zero.
    """
    import torch
    from torchtune import config

    tokenizer = config.instantiate(cfg.tokenizer)
    held_out = Path(cfg.demo_dir) / "pairs" / "held_out.jsonl"
    dataset = config.instantiate(cfg.dataset, tokenizer, data_files=str(held_out))
    pairs = [dataset[index] for index in range(len(dataset))]
    folders = {"base": Path(cfg.checkpointer.checkpoint_dir), "tuned": tuned}
    with torch.inference_mode():
        log_probs = {
            name: demo.answer_log_probs(demo.load(folder), pairs, pad_id=tokenizer.pad_id)
            for name, folder in folders.items()
        }
    print(f"{len(pairs)} held-out pairs: a first sentence, preferred to the whole docstring")
    print("model  rewards/accuracies  rewards/margins  log_probs/chosen  log_probs/rejected")
    for name, of_model in log_probs.items():
        chosen, rejected = BETA * (of_model - log_probs["base"])
        accuracy = (chosen > rejected).float().mean()
        margin = (chosen - rejected).mean()
        print(
            f"{name:<6} {accuracy:>18.3f} {margin:>16.3f}"
            f" {of_model[0].mean():>17.1f} {of_model[1].mean():>19.1f}"
        )


if __name__ == "__main__":
    main()

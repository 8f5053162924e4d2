"""Public training programs that run unchanged under `adaptive-batch emulate`.

    python benchmarks/emulated_programs.py [--sources DIR] [--only NAME ...] [--work DIR]

emulated_programs.csv lists the programs: repository, commit, folder, command, devices, and a limit
of steps for programs that have none. This script creates their data sets, models and tokenizers,
tiny and meaningless, in `../data` of the folder. Files with names that a program fixes are created
beside its own files (`here`). Only the programs are downloaded: from DIR/OWNER/NAME with
`--sources`, otherwise from GitHub. An interrupted run continues.

The environment needs PyTorch's CUDA build and the packages that the programs import: torchvision
timm transformers trl peft accelerate diffusers sentence-transformers evaluate lightning
torchtune gymnasium tyro tensorboard wandb ultralytics configargparse imageio pycocotools loralib
opencv-python-headless hydra-core boto3 sktime reformer-pytorch patool.
"""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from base64 import b64encode
from pathlib import Path
from typing import Any

import harness
import numpy as np
from PIL import Image

TABLE = Path(__file__).with_suffix(".csv")
MINUTES = "10"  # a program that takes longer has not ended
WORDS = [f"word{number}" for number in range(200)]
SPLITS = ("train", "validation", "test")

# Data sets of text: fields, each with its number of words or its kind.
ROWS = {
    "pairs": "prompt:5 chosen:20 rejected:20",
    "answers": "prompt:5 completion:20 label:flag",
    "prompts": "prompt:turns",
    "sentences": "sentence1:20 sentence2:20 label:name",
    "instructions": "instruction:9 input:1 output:20",
    "codes": "context:ids completion:ids",
    "here/sentence-transformers/stsb": "sentence1:20 sentence2:20 score:number",
}
KINDS = {
    "flag": lambda: random.random() < 0.5,
    "name": lambda: random.choice("ab"),
    "ids": lambda: random.choices(range(50_000), k=9),
    "number": random.random,
    "turns": lambda: [{"role": "user", "content": text(5)}],
}
METRIC = """
import datasets
import evaluate
class Metric(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int32")
        features = datasets.Features(predictions=number, references=number)
        return evaluate.MetricInfo(description="", citation="", features=features)
    def _compute(self, predictions, references, **_):
        pairs = list(zip(predictions, references))
        return {"accuracy": sum(one == other for one, other in pairs) / len(pairs)}
"""


def programs() -> list[dict[str, str]]:
    """Return the rows of the table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---- data sets and models


def text(length: int) -> str:
    return " ".join(random.choices(WORDS, k=length))


def write(file: Path, content: str | bytes | Image.Image | list[Any]) -> None:
    """Write a file and its folder; a list is written as lines of JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        content = "".join(f"{json.dumps(row)}\n" for row in content)
    if isinstance(content, Image.Image):
        content.save(file)
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else content)


def image(mode: str = "RGB", size: int = 96) -> Image.Image:
    pixels = np.random.randint(0, 256, (size, size, len(mode)), dtype=np.uint8)
    return Image.fromarray(pixels if len(mode) > 1 else pixels[..., 0] % 2)


def make_texts(data: Path) -> None:
    for name, count in (("train", 4000), ("valid", 400), ("test", 400)):
        write(data / f"text/{name}.txt", "".join(f"{text(20)}\n" for _ in range(count)))
    for name in ("train", "val"):
        tokens = np.random.randint(0, 50_000, 20_000, dtype=np.uint16)
        write(data / f"tokens/{name}.bin", tokens.tobytes())
    for name, fields in ROWS.items():
        kinds = dict(field.split(":") for field in fields.split())
        for split in SPLITS:
            rows = [
                {
                    field: KINDS[kind]() if kind in KINDS else text(int(kind))
                    for field, kind in kinds.items()
                }
                for _ in range(64)
            ]
            write(data / name / f"{split}.json", rows)
    # A folder with the hub's name of a data set.
    triplets = data / "here/sentence-transformers/all-nli"
    row = dict.fromkeys(("anchor", "positive", "negative"), text(5))
    for split, count in (("train", 10_000), ("dev", 1000)):
        write(triplets / f"{split}.json", [row] * count)
    splits = "".join(f"  - {{split: {name}, path: {name}.json}}\n" for name in ("train", "dev"))
    card = f"---\nconfigs:\n- config_name: triplet\n  data_files:\n{splits}---\n"
    write(triplets / "README.md", card)
    write(data / "here/accuracy/accuracy.py", METRIC)


def make_images(data: Path) -> None:
    for split in ("train", "val"):
        for number in range(32):
            write(data / f"images/{split}/kind{number % 8}/{number}.png", image())
        rows = [{"file_name": f"kind0/{number}.png", "text": text(5)} for number in range(0, 32, 8)]
        write(data / f"captions/{split}/metadata.jsonl", rows)
        (data / f"captions/{split}/kind0").symlink_to(f"../../images/{split}/kind0")
    for number in range(20):
        write(data / f"here/data/imgs/{number}.png", image())
        write(data / f"here/data/masks/{number}.png", image("L"))
    for split in ("train", "test"):
        for number in range(8):
            write(data / f"here/dataset/BSDS300/images/{split}/{number}.jpg", image(size=300))
    # MNIST's own format: a magic number, sizes, and bytes.
    for split, count in (("train", 640), ("t10k", 128)):
        start = data / f"here/data/MNIST/raw/{split}"
        pixels = struct.pack(">4i", 2051, count, 28, 28) + os.urandom(count * 784)
        write(Path(f"{start}-images-idx3-ubyte"), pixels)
        labels = struct.pack(">2i", 2049, count) + bytes(number % 10 for number in range(count))
        write(Path(f"{start}-labels-idx1-ubyte"), labels)
    (data / "MNIST").symlink_to("here/data/MNIST")
    frames = [{"file_path": f"./{n}", "transform_matrix": np.eye(4).tolist()} for n in range(4)]
    for number in range(4):
        write(data / f"blender/{number}.png", image("RGBA", 160))
    for split in ("train", "val", "test"):
        write(
            data / f"blender/transforms_{split}.json", [{"camera_angle_x": 0.7, "frames": frames}]
        )
    # One set of images with boxes, as COCO's and as YOLO's.
    for split in ("train2017", "val2017"):
        images, boxes = [], []
        for number in range(8):
            write(data / f"coco/images/{split}/{number}.jpg", image(size=128))
            write(data / f"coco/labels/{split}/{number}.txt", "1 0.5 0.5 0.3 0.4\n")
            images.append({"id": number, "file_name": f"{number}.jpg", "height": 128, "width": 128})
            box = {"bbox": [40, 30, 38, 51], "area": 1938, "iscrowd": 0, "category_id": 1}
            outline = [[40, 30, 78, 30, 78, 81, 40, 81]]
            boxes.append({"id": number + 1, "image_id": number, "segmentation": outline, **box})
        (data / f"coco/{split}").symlink_to(f"images/{split}")
        kinds = [{"id": 1, "name": "cat"}]
        coco = {"images": images, "annotations": boxes, "categories": kinds}
        write(data / f"coco/annotations/instances_{split}.json", [coco])
    names = "train: images/train2017\nval: images/val2017\nnames: [dog, cat]\n"
    write(data / "coco/coco.yaml", f"path: {data}/coco\n{names}")


def lines(rows: np.ndarray, separator: str) -> str:
    return "".join(separator.join(map(str, row)) + "\n" for row in rows.tolist())


def make_others(data: Path) -> None:
    """Write points of shapes, a graph and a time series."""
    points = data / "here/data/modelnet40_normal_resampled"
    shapes = [f"kind{number}" for number in range(10)]
    write(points / "modelnet10_shape_names.txt", "\n".join(shapes))
    for split, count in (("train", 6), ("test", 3)):
        names = [f"{shape}_{split}{number}" for shape in shapes for number in range(count)]
        write(points / f"modelnet10_{split}.txt", "\n".join(names))
        for name in names:
            shape = points / name.split("_")[0]
            write(shape / f"{name}.txt", lines(np.random.rand(300, 6), ","))
    features = np.random.randint(0, 2, (2000, 100)).tolist()
    nodes = [f"{n} {' '.join(map(str, row))} kind{n % 7}\n" for n, row in enumerate(features)]
    write(data / "here/cora/cora.content", "".join(nodes))
    write(data / "here/cora/cora.cites", lines(np.random.randint(0, 2000, (5000, 2)), " "))
    series = lines(np.random.randn(2000, 7), ",").splitlines()
    start = np.datetime64("2020-01-01T00")
    hours = [f"{start + number}:00,{row}" for number, row in enumerate(series)]
    write(data / "series.csv", "\n".join(["date,a,b,c,d,e,f,OT", *hours]))


def make_models(data: Path) -> None:
    """Write models with random weights, each with a tokenizer of :data:`WORDS`."""
    import diffusers
    import matplotlib
    import torch
    import torchvision
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torchtune.models.llama3_2 import llama3_2

    special = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "unk", "mask", "cls", "sep")}
    numbers = {word: number for number, word in enumerate([*special.values(), *WORDS])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=128, bos_token="<eos>", **special
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    layers = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    size = {**layers, "num_attention_heads": 4, "vocab_size": 512, "pad_token_id": 0}
    ends = {"eos_token_id": 1, "bos_token_id": 1}
    for name, head, config in (
        ("llama", "ForCausalLM", transformers.LlamaConfig(**size, **ends, num_key_value_heads=2)),
        ("bert", "ForMaskedLM", transformers.BertConfig(**size)),
        ("vit", "ForImageClassification", transformers.ViTConfig(**layers, num_attention_heads=4)),
    ):
        family = type(config).__name__.removesuffix("Config")
        getattr(transformers, family + head)(config).save_pretrained(data / name)
        reader = transformers.ViTImageProcessor() if name == "vit" else tokenizer
        reader.save_pretrained(data / name)
    encoder = diffusers.AutoencoderKL(
        block_out_channels=(32, 32, 64, 64),
        norm_num_groups=8,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
    encoder.save_pretrained(data / "here/stabilityai/sd-vae-ft-ema")
    letters = [chr(number) for number in range(33, 127)] + ["<|startoftext|>", "<|endoftext|>"]
    letters += [f"{letter}</w>" for letter in letters]
    clip = {name: layers[name] // 4 or 2 for name in ("hidden_size", "intermediate_size")}
    diffusers.StableDiffusionPipeline(
        vae=encoder,
        text_encoder=transformers.CLIPTextModel(
            transformers.CLIPTextConfig(
                **clip, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
            )
        ),
        tokenizer=transformers.CLIPTokenizer(
            vocab={letter: number for number, letter in enumerate(letters)},
            merges=[],
            model_max_length=77,
        ),
        unet=diffusers.UNet2DConditionModel(
            block_out_channels=(32, 64),
            norm_num_groups=8,
            layers_per_block=1,
            cross_attention_dim=64,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        scheduler=diffusers.DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(data / "diffusion")
    tune = llama3_2(
        128_256, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=64, max_seq_len=512
    )
    bytes_of_tokens = [f"{b64encode(bytes([n])).decode()} {n}\n" for n in range(256)]
    write(data / "tune/tokenizer.model", "".join(bytes_of_tokens))
    torch.save(tune.state_dict(), data / "tune/model.pt")
    # Files of PyTorch's hub, and a font.
    for make, weights in (
        (torchvision.models.vgg16, torchvision.models.VGG16_Weights),
        (torchvision.models.resnet50, torchvision.models.ResNet50_Weights),
    ):
        file = data / "torch/hub/checkpoints" / weights.IMAGENET1K_V1.url.rpartition("/")[2]
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(make().state_dict(), file)
    font = Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")
    write(data / "home/.config/Ultralytics/Arial.ttf", font.read_bytes())


# ---- programs


def check_out(row: dict[str, str], sources: Path, folder: Path) -> None:
    """Write the files of a program at its commit to a folder."""
    clone = sources / row["repository"]
    if not clone.exists():
        address = f"https://github.com/{row['repository']}"
        clone_bare = ["git", "clone", "-q", "--bare", "--filter=blob:none"]
        subprocess.run([*clone_bare, address, clone], check=True)
    folder.mkdir(parents=True)
    git = ["git", f"--git-dir={clone}", f"--work-tree={folder}"]
    # A clone may lack large files. The command then fails at its end.
    subprocess.run(
        [*git, "checkout", "-qf", row["commit"], "--", row["folder"]],
        env={**os.environ, "GIT_INDEX_FILE": str(folder / ".index")},
        capture_output=True,
    )


def run(row: dict[str, str], sources: Path, work: Path) -> dict[str, Any]:
    """Run a program, and return the figures of its report.

    Raises:
        RuntimeError: it failed, was stopped, or did not use the device.
    """
    root, scratch, file = work / "programs" / row["name"], work / "scratch", work / "report.json"
    for old in (root, scratch):
        shutil.rmtree(old, ignore_errors=True)
    file.unlink(missing_ok=True)
    check_out(row, sources, root)
    folder = root / row["folder"]
    shutil.copytree(work / "data/here", folder, dirs_exist_ok=True)
    emulate = [sys.executable, "-m", "adaptive_batch", "emulate", "--device", "h100"]
    emulate += ["--devices", row["devices"], "--json", str(file), "--output", str(scratch)]
    emulate += ["--minutes", MINUTES, *(["--steps", row["max_steps"]] if row["max_steps"] else [])]
    log = work / f"{row['name']}.log"
    with log.open("w") as out:
        status = subprocess.run(
            [*emulate, "--", *row["command"].split()],
            cwd=folder,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(root)]),
                "HOME": str(work / "data/home"),
                "HF_HOME": str(work / "data/home/hf"),
                "TORCH_HOME": str(work / "data/torch"),
                "MPLBACKEND": "Agg",
            },
            stdout=out,
            stderr=subprocess.STDOUT,
        ).returncode
    report = json.loads(file.read_text())
    processes = report["processes"]
    devices = [device for process in processes for device in process["devices"]]
    if status or report["ended_by_time_limit"] or not devices:
        errors = re.findall(r"(?m)^.*\b\w*(?:Error|Exception)\b: .*", log.read_text())
        raise RuntimeError(f"exit status {status}: {[*errors, f'see {log}'][0]}")
    shapes = {line for one in processes for kind, _, line, _ in one["made_up"] if kind == "shape"}
    return {
        "allocated_bytes": max(one["allocated"] for one in devices),
        "reserved_bytes": max(one["reserved"] for one in devices),
        "steps": max(one["steps"] for one in processes),
        "shapes_made_up": sorted(shapes),
        "not_counted": sorted({name for one in processes for name in one["not_counted"]}),
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="programs of these names")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="clones, as DIR/OWNER/NAME")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep data and logs here")
    arguments = parser.parse_args()
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="programs-"))).resolve()
    data = work / "data"
    if not data.exists():
        random.seed(0)
        np.random.seed(0)
        for make in (make_texts, make_images, make_others, make_models):
            make(data)
    sources = (arguments.sources or work / "sources").resolve()
    harness.run(
        "emulated_programs",
        arguments.output,
        [row for row in programs() if row["name"] in (arguments.only or [row["name"]])],
        lambda row: run(row, sources, work),
        columns="name:<32 allocated_bytes:>15 reserved_bytes:>15 steps:>6 seconds:>7.1f",
        figures=lambda rows: {"ended": sum("failed" not in row for row in rows)},
        resumes=True,
    )


if __name__ == "__main__":
    main()

"""The wheel holds what `tune run` finds, the configs by name, and nothing that torchtune owns."""

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_recipes_as_modules_and_configs_inside_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    modules = {name for name in names if "/" not in name}
    assert modules == {path.name for path in (ROOT / "recipes").glob("*.py")}
    assert {"adaptive_batch/py.typed", "adaptive_batch/configs/demo_cpu.yaml"} <= set(names)
    assert not [name for name in names if name.startswith(("recipes/", "configs/", "tests/"))]


def test_the_core_depends_on_torch_alone(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    needs = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert [need.split()[1].split(">")[0] for need in needs] == ["torch"]


def test_installed_from_the_wheel_the_recipe_is_found_from_any_directory(wheel, tmp_path, small):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = (
        "import adaptive_full_finetune, adaptive_batch; print(adaptive_full_finetune.__file__, adaptive_batch.__file__)"
    )
    found = subprocess.run(
        [sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert all(str(site) in path for path in found.stdout.split()[-2:])
    tune = Path(sys.executable).parent / "tune"
    for name, status, said in (("small.yaml", 0, "Loss: "), ("demo_cpu", 1, "epochs=0: give a whole number")):
        config = str(small.folder / name) if name.endswith("yaml") else name
        overrides = ["epochs=1", "max_steps_per_epoch=1"] if status == 0 else ["epochs=0"]
        done = subprocess.run(
            [tune, "run", "adaptive_full_finetune", "--config", config, f"output_dir={tmp_path / 'out'}", *overrides],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr[-3000:]
        assert said in done.stderr


def test_torchtunes_own_recipes_are_as_it_installed_them():
    files = [
        file for file in importlib.metadata.files("torchtune") or () if str(file).startswith("recipes/") and file.hash
    ]
    assert len(files) > 50
    for file in files:
        digest = hashlib.new(file.hash.mode, Path(file.locate()).read_bytes()).digest()
        assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value


@pytest.mark.parametrize("name", ["adaptive_full_finetune", "adaptive_probe"])
def test_tune_finds_the_recipe_as_a_module(name):
    assert importlib.util.find_spec(name)

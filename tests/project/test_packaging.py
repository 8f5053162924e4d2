"""The wheel has the recipes and the configs, and the source archive makes the same wheel."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED_FOLDERS = (
    "adaptive_batch",
    "recipes",
    "configs",
    "tests",
    "benchmarks",
    "docs",
    "examples",
)
MADE = {".pyc", ".so"}


def build(source, folder, *what):
    command = [
        sys.executable,
        "-m",
        "build",
        *what,
        "--no-isolation",
        "--outdir",
        str(folder),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "--wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source archive, unpacked."""
    packed = build(ROOT, tmp_path_factory.mktemp("sdist"), "--sdist")
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    (project,) = folder.iterdir()
    return project


def run(*command, cwd, limit=120):
    """Run a command without an active virtual environment and without PYTHONPATH."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done


@pytest.mark.slow
def test_the_wheel_holds_recipes_as_modules_and_configs_inside_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    modules = {name for name in names if "/" not in name}
    assert modules == {path.name for path in (ROOT / "recipes").glob("*.py")}
    assert modules == {
        f"adaptive_{name}.py"
        for name in ("full_finetune", "lora_finetune", "dpo", "distill", "probe", "estimate")
    }
    configs = {f"adaptive_batch/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "adaptive_batch").rglob("*.py")}
    assert configs | package | {
        "adaptive_batch/py.typed",
        "adaptive_batch/report/page.html.jinja",
    } <= set(names)
    assert {name.split("/")[0] for name in names} - modules == {"adaptive_batch", dist_info(wheel)}
    assert (
        zipfile.ZipFile(wheel).read(f"{dist_info(wheel)}/licenses/LICENSE")
        == (ROOT / "LICENSE").read_bytes()
    )


def dist_info(wheel):
    return "-".join(wheel.name.split("-")[:2]) + ".dist-info"


def test_the_core_depends_on_torch_alone(wheel):
    metadata = zipfile.ZipFile(wheel).read(f"{dist_info(wheel)}/METADATA").decode()
    needs = [
        line
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    assert [need.split()[1].split(">")[0] for need in needs] == ["torch"]


@pytest.mark.install
@pytest.mark.timeout(1200)
def test_the_wheel_installs_into_a_new_environment_that_trains_from_any_folder(
    wheel, small, tmp_path
):
    """Install with pip, the wheel and constraints.txt only."""
    venv.create(tmp_path / "venv", with_pip=True)
    scripts = tmp_path / "venv" / "bin"
    pip = [scripts / "python", "-m", "pip"]
    words = ["install", "--quiet", "-c", ROOT / "constraints.txt"]
    wanted = f"adaptive-batch[recipes,report] @ {wheel.as_uri()}"
    run(*pip, *words, wanted, cwd=tmp_path, limit=900)
    assert run(*pip, "check", cwd=tmp_path).stdout == "No broken requirements found.\n"
    run(scripts / "python", "-W", "error", "-c", "import adaptive_batch", cwd=tmp_path)

    folder = tmp_path / "anywhere"
    folder.mkdir()
    assert "WRONG" not in run(scripts / "adaptive-batch", "check", cwd=folder).stdout
    config = ["--config", small.folder / "small.yaml", f"output_dir={folder / 'out'}"]
    tune = [scripts / "tune", "run"]
    search = run(*tune, "adaptive_probe", *config, "probe.maximum=2", cwd=folder)
    assert "max_batch_size: 2" in search.stdout + search.stderr
    run(*tune, "adaptive_full_finetune", *config, "max_steps_per_epoch=1", cwd=folder)
    run(scripts / "adaptive-batch", "audit", folder / "out", cwd=folder)
    run(scripts / "adaptive-batch", "report", folder / "out", cwd=folder)
    assert (folder / "out" / "adaptive_batch" / "report.html").is_file()


def test_the_source_archive_has_all_that_the_tests_and_the_site_need(sdist):
    ours = {path for name in SHIPPED_FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()}
    ours |= {path for path in ROOT.glob("*") if path.is_file() and not path.name.startswith(".")}
    wanted = {str(path.relative_to(ROOT)) for path in ours if path.suffix not in MADE}
    assert {
        "mkdocs.yml",
        "Makefile",
        "constraints.txt",
        "LICENSE",
        "docs/images/demo.png",
    } <= wanted
    assert wanted - {str(path.relative_to(sdist)) for path in sdist.rglob("*")} == set()


def test_the_source_archive_makes_the_same_wheel(sdist, wheel, tmp_path):
    again = zipfile.ZipFile(build(sdist, tmp_path, "--wheel"))
    first = zipfile.ZipFile(wheel)
    assert {name: again.read(name) for name in again.namelist()} == {
        name: first.read(name) for name in first.namelist()
    }

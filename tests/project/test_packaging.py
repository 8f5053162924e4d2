"""What is published: a wheel with what `tune run` finds, the configs by name and nothing that
torchtune owns; and a source archive that makes it.
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
def published(tmp_path_factory):
    """The wheel; the source archive, unpacked; and as it is."""
    wheel = build(ROOT, tmp_path_factory.mktemp("wheel"), "--wheel")
    packed = build(ROOT, tmp_path_factory.mktemp("sdist"), "--sdist")
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    (project,) = folder.iterdir()
    return wheel, project, packed


@pytest.fixture(scope="module")
def wheel(published):
    return published[0]


@pytest.fixture(scope="module")
def sdist(published):
    return published[1]


@pytest.fixture(scope="module")
def with_torch_alone(wheel, tmp_path_factory):
    """Python of a new environment with the wheel, torch and what torch needs, and nothing else."""
    return installed(wheel, tmp_path_factory.mktemp("torch_alone"), needs_of("torch"))


def needs_of(name):
    """The distributions that one needs, itself among them."""
    found, left = {}, [name]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            needs = map(Requirement, found[name].requires or ())
            left += [
                need.name
                for need in needs
                if need.marker is None or need.marker.evaluate({"extra": ""})
            ]
    return found


def installed(wheel, folder, distributions):
    """Install the wheel by pip into a new environment that also sees some distributions of this
    one.
    """
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
    ]
    subprocess.run([*pip, str(wheel)], check=True, timeout=120)
    seen = folder / "seen"
    seen.mkdir()
    for distribution in distributions.values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (seen / name).exists():
                (seen / name).symlink_to(distribution.locate_file(name))
    (path,) = (folder / "venv").glob("lib/python*/site-packages")
    (path / "seen.pth").write_text(f"{seen}\n")
    return python


def run(*command, cwd, status=0, limit=120):
    """Run a command as one does who has no virtual environment active and no PYTHONPATH."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr[-3000:]
    return done


# the wheel


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


# installed with torch alone


@pytest.mark.slow
def test_the_core_imports_with_torch_alone(with_torch_alone, tmp_path):
    program = """
import importlib, importlib.util, pkgutil, adaptive_batch

needs_more = ("adaptive_batch.torchtune", "adaptive_batch.integrations.")
modules = pkgutil.walk_packages(
    adaptive_batch.__path__, "adaptive_batch.", onerror=lambda name: None
)
for module in modules:
    if not module.name.startswith(needs_more):
        importlib.import_module(module.name)
print(adaptive_batch.__file__)
for name in ("torchtune", "omegaconf", "recipes", "tests", "configs", "demo", "examples"):
    assert importlib.util.find_spec(name) is None, name
import adaptive_full_finetune
"""
    done = run(with_torch_alone, "-c", program, cwd=tmp_path, status=1)
    assert done.stdout.startswith(str(with_torch_alone.parents[1]))
    assert re.search(r"ModuleNotFoundError: No module named '(torchtune|omegaconf)'", done.stderr)


@pytest.mark.slow
def test_configs_are_listed_and_copied_with_torch_alone(with_torch_alone, tmp_path):
    listed = run(with_torch_alone, "-m", "adaptive_batch", "configs", cwd=tmp_path).stdout
    assert [line.split()[0] for line in listed.splitlines()] == sorted(
        p.stem for p in (ROOT / "configs").glob("*.yaml")
    )
    run(with_torch_alone, "-m", "adaptive_batch", "configs", "demo_cpu", "mine.yaml", cwd=tmp_path)
    assert (tmp_path / "mine.yaml").read_bytes() == (
        ROOT / "configs" / "demo_cpu.yaml"
    ).read_bytes()


@pytest.mark.slow
def test_check_says_with_torch_alone_that_the_recipes_need_more(with_torch_alone, tmp_path):
    done = run(with_torch_alone, "-m", "adaptive_batch", "check", cwd=tmp_path, status=1)
    assert re.search(r"torchtune .*not installed", done.stdout)
    assert "pip install" in done.stdout


@pytest.mark.slow
def test_the_import_warns_of_nothing_and_reads_no_torch(with_torch_alone, tmp_path):
    program = "import sys, adaptive_batch; assert 'torch' not in sys.modules"
    done = run(with_torch_alone, "-W", "error", "-c", program, cwd=tmp_path)
    assert done.stdout + done.stderr == ""


@pytest.mark.slow
def test_the_command_is_the_module(with_torch_alone, tmp_path):
    command = with_torch_alone.parent / "adaptive-batch"
    by_module = run(with_torch_alone, "-m", "adaptive_batch", "--help", cwd=tmp_path).stdout
    assert run(command, "--help", cwd=tmp_path).stdout == by_module
    assert by_module.startswith("usage: adaptive-batch ")
    for name in ("check", "configs", "keys", "audit", "report"):
        assert name in by_module
    run(command, "audit", "nowhere", cwd=tmp_path, status=2)
    run(command, "nothing", cwd=tmp_path, status=2)


# installed from the registry


@pytest.mark.install
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "archive",
    # The source archive makes the same wheel: see the last test.
    ["wheel", pytest.param("sdist", marks=pytest.mark.nightly)],
)
def test_each_archive_installs_into_a_new_environment_that_trains_from_any_folder(
    published, small, tmp_path, archive
):
    """Only pip, the archive, constraints.txt and the registry: nothing of this environment."""
    wheel, _, sdist = published
    package = {"wheel": wheel, "sdist": sdist}[archive]
    venv.create(tmp_path / "venv", with_pip=True)
    scripts = tmp_path / "venv" / "bin"
    pip = [scripts / "python", "-m", "pip"]
    words = ["install", "--quiet", "-c", ROOT / "constraints.txt"]
    wanted = f"adaptive-batch[recipes,report] @ {package.as_uri()}"
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


# the source archive


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

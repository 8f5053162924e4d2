import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement as PackagingRequirement

from adaptive_batch.torchtune.environment import (
    REQUIREMENTS,
    Finding,
    ImportResult,
    as_lines,
    collect_devices,
    collect_versions,
    findings,
    judge_commands,
    try_import,
)

PROJECT = Path(__file__).parents[3]
GOOD = {
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "torchtune": "0.6.1",
    "torchao": "0.15.0",
    "torchdata": "0.11.0",
    "omegaconf": "2.4.0",
    "datasets": "5.2.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "tqdm": "4.70.1",
    "bitsandbytes": None,
}
WORKS = ImportResult(succeeded=True)

# What Python writes when a torchao is there that torchtune cannot import, shortened.
BROKEN_TORCHAO = """\
Skipping import of cpp extensions due to incompatible torch version 2.13.0+cpu for torchao version 0.12.0
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torchtune/__init__.py", line 16, in <module>
    import torchao  # noqa
  File "/venv/lib/python3.11/site-packages/torchao/quantization/utils.py", line 12, in <module>
    from torch.utils._python_dispatch import nothing
ImportError: cannot import name 'nothing' from 'torch.utils._python_dispatch'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torchtune/__init__.py", line 18, in <module>
    raise ImportError(
ImportError:
        torchao not installed.
"""
NEW_TORCHAO = """\
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torchtune/modules/low_precision/nf4_linear.py", line 12, in <module>
    from torchao.dtypes.nf4tensor import linear_nf4
ModuleNotFoundError: No module named 'torchao.dtypes.nf4tensor'
"""
OTHER_MODULE = """\
Skipping import of cpp extensions due to incompatible torch version 2.13.0+cpu for torchao version 0.15.0
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torchtune/datasets/_sft.py", line 11, in <module>
    from datasets import load_dataset
ModuleNotFoundError: No module named 'datasets'
"""


def wrong(found):
    return {finding.subject: finding for finding in found if finding.is_wrong}


def test_the_tried_versions_are_all_right():
    assert wrong(findings(GOOD, WORKS)) == {}


@pytest.mark.parametrize(
    ("name", "version", "mend"),
    [
        ("torchao", "0.12.0", "pip install 'torchao==0.15.0'"),
        ("torchao", "0.16.0", "pip install 'torchao==0.15.0'"),
        ("torchao", "0.16.0.dev20261001+cpu", "pip install 'torchao==0.15.0'"),
        ("torchao", None, "pip install 'torchao==0.15.0'"),
        ("torchtune", "0.6.0", "pip install 'torchtune==0.6.1'"),
        ("torchtune", None, "pip install 'torchtune==0.6.1'"),
        ("torch", "2.5.1+cu124", "pip install 'torch==2.13.0'"),
        ("datasets", None, "pip install 'datasets==5.2.0'"),
        ("bitsandbytes", "0.41.1", "pip install --upgrade 'bitsandbytes>=0.43'"),
        ("python", "3.9.19", "make the environment anew with Python 3.10 or later"),
    ],
)
def test_a_version_that_will_not_do_is_wrong_and_alone_so(name, version, mend):
    found = wrong(findings(GOOD | {name: version}, WORKS))
    assert {subject: finding.mend for subject, finding in found.items()} == {name: mend}


def test_versions_are_compared_as_numbers():
    assert (
        wrong(findings(GOOD | {"torch": "2.10.0", "tqdm": "4.100", "torchdata": "0.11", "python": "3.14.0"}, WORKS))
        == {}
    )


@pytest.mark.parametrize(
    ("version", "output", "what", "mend"),
    [
        ("0.12.0", BROKEN_TORCHAO, "cannot import name 'nothing'", "pip install 'torchao==0.15.0'"),
        ("0.17.0", NEW_TORCHAO, "No module named 'torchao.dtypes.nf4tensor'", "pip install 'torchao==0.15.0'"),
        (None, BROKEN_TORCHAO, "torchao is not installed", "pip install 'torchao==0.15.0'"),
        ("0.15.0", OTHER_MODULE, "No module named 'datasets'", "pip install 'datasets==5.2.0'"),
        ("0.15.0", "OSError: libcudart.so", "libcudart", "pip install --force-reinstall --no-deps 'torchtune==0.6.1'"),
        ("0.15.0", "", "no message", "pip install --force-reinstall --no-deps 'torchtune==0.6.1'"),
    ],
)
def test_a_failed_import_names_what_happened_and_whose_fault_it_is(version, output, what, mend):
    finding = wrong(findings(GOOD | {"torchao": version}, ImportResult(False, output)))["import torchtune"]
    assert what in finding.found
    assert finding.mend == mend


def test_the_right_torchao_that_is_broken_all_the_same_is_installed_anew():
    finding = wrong(findings(GOOD, ImportResult(False, BROKEN_TORCHAO)))["import torchtune"]
    assert finding.mend == "pip install --force-reinstall --no-deps 'torchao==0.15.0'"


def test_tune_beside_this_python_is_right_and_another_on_path_is_told():
    same = judge_commands(recipe_found=True, tune_beside="/venv/bin/tune", tune_on_path="/venv/bin/tune")
    assert same[-1] == Finding("tune", "/venv/bin/tune")
    for on_path, told in (("/usr/bin/tune", "PATH has another one, /usr/bin/tune"), (None, "PATH has none")):
        found = judge_commands(recipe_found=True, tune_beside="/venv/bin/tune", tune_on_path=on_path)
        assert wrong(found) == {}
        assert told in found[-1].found


def test_no_tune_beside_this_python_is_wrong_even_with_another_on_path():
    for on_path in (None, "/usr/bin/tune"):
        assert set(wrong(judge_commands(recipe_found=True, tune_beside=None, tune_on_path=on_path))) == {"tune"}


def test_a_recipe_that_cannot_be_found_is_wrong():
    found = judge_commands(recipe_found=False, tune_beside="/venv/bin/tune", tune_on_path="/venv/bin/tune")
    assert set(wrong(found)) == {"adaptive_full_finetune"}


def test_findings_are_one_aligned_line_each():
    lines = as_lines([Finding("a", "1"), Finding("longer", "2", "pip install 'x==3'")])
    assert lines == ["a       ok     1", "longer  WRONG  2; mend it with: pip install 'x==3'"]


def test_the_versions_asked_for_are_those_of_the_package_and_of_the_constraints():
    every = [PackagingRequirement(text) for text in metadata.requires("adaptive-batch")]
    asked = [r for r in every if r.marker is None or r.marker.evaluate({"extra": "recipes"})]
    assert {requirement.name for requirement in asked} == {n for n, r in REQUIREMENTS.items() if not r.optional}
    tried = dict(re.findall(r"^(\S+)==(\S+)$", (PROJECT / "constraints.txt").read_text(), re.MULTILINE))
    probed = [
        "0.1",
        "0.5",
        "0.6.0",
        "0.6.1",
        "0.6.2",
        "0.10",
        "0.11.0",
        "0.11.1",
        "0.12",
        "0.13",
        "0.15.0",
        "0.16",
        "0.21",
    ]
    probed += ["1.0", "2.3", "2.4.9", "2.5", "2.6", "2.13", "3.0", "4.65", "4.66", "5.2"]
    for requirement in asked:
        ours = REQUIREMENTS[requirement.name]
        assert ours.tried == tried[requirement.name]
        for version in probed:
            assert ours.admits(version) == requirement.specifier.contains(version), (requirement.name, version)


def test_what_is_installed_here_is_seen():
    versions = collect_versions()
    assert versions.keys() == GOOD.keys()
    assert versions["torch"] == torch.__version__
    assert versions["torchtune"] == "0.6.1"


def test_an_import_that_fails_in_its_own_process_gives_its_traceback():
    assert try_import("json") == WORKS
    failed = try_import("no_such_module_at_all")
    assert not failed.succeeded
    assert "No module named 'no_such_module_at_all'" in failed.output


def test_devices_are_said_with_their_memory_in_gib():
    found = collect_devices()
    assert found[0].subject == "cpu"
    assert re.fullmatch(r"\d+\.\d GiB, \d+\.\d GiB of it available", found[0].found)
    assert len(found) >= 2


def test_the_command_ends_with_1_and_the_mending_command_where_torchao_is_broken(tmp_path):
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("from torch import no_such_name\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "adaptive_batch", "check"]
    finished = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 1, finished.stderr
    (line,) = [line for line in finished.stdout.splitlines() if "WRONG" in line]
    assert line.startswith("import torchtune")
    assert "cannot import name 'no_such_name' from 'torch'" in line
    assert line.endswith("mend it with: pip install --force-reinstall --no-deps 'torchao==0.15.0'")

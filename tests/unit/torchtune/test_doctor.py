import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adaptive_batch.torchtune.doctor import (
    Finding,
    check,
    check_devices,
    check_import,
    check_tune,
    check_versions,
    import_error,
    installed_version,
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
    return {finding.subject: finding.fix for finding in found if finding.fix}


def versions(**others):
    return (GOOD | others).get


def test_the_tried_versions_are_all_right():
    assert wrong(check_versions(versions())) == {}
    tried = dict(re.findall(r"^(\S+)==(\S+)$", (PROJECT / "constraints.txt").read_text(), re.MULTILINE))
    assert wrong(check_versions(tried.get)) == {}


@pytest.mark.parametrize(
    ("name", "version", "fix"),
    [
        ("torchao", "0.12.0", "pip install 'torchao<0.16,>=0.13'"),
        ("torchao", "0.16.0", "pip install 'torchao<0.16,>=0.13'"),
        ("torchao", "0.16.0.dev20261001+cpu", "pip install 'torchao<0.16,>=0.13'"),
        ("torchao", None, "pip install 'torchao<0.16,>=0.13'"),
        ("torchtune", "0.6.0", "pip install 'torchtune==0.6.1'"),
        ("torchtune", None, "pip install 'torchtune==0.6.1'"),
        ("torch", "2.8.0+cu128", "pip install 'torch>=2.11'"),
        ("datasets", None, "pip install 'datasets>=3.0'"),
        ("bitsandbytes", "0.41.1", "pip install 'bitsandbytes>=0.43'"),
        ("python", "3.9.19", "make a new environment with another Python"),
    ],
)
def test_a_version_that_will_not_do_is_wrong_and_alone_so(name, version, fix):
    assert wrong(check_versions(versions(**{name: version}))) == {name: fix}


def test_versions_are_compared_as_numbers():
    assert wrong(check_versions(versions(torch="2.100.0", tqdm="4.100", torchdata="0.11", python="3.14.0"))) == {}


@pytest.mark.parametrize(
    ("version", "output", "what", "fix"),
    [
        ("0.12.0", BROKEN_TORCHAO, "cannot import name 'nothing'", "pip install 'torchao<0.16,>=0.13'"),
        ("0.17.0", NEW_TORCHAO, "No module named 'torchao.dtypes.nf4tensor'", "pip install 'torchao<0.16,>=0.13'"),
        (None, BROKEN_TORCHAO, "torchao is not installed", "pip install 'torchao<0.16,>=0.13'"),
        ("0.15.0", OTHER_MODULE, "No module named 'datasets'", "pip install 'datasets>=3.0'"),
        ("0.15.0", "OSError: libcudart.so", "libcudart", "pip install --force-reinstall --no-deps 'torchtune==0.6.1'"),
        ("0.15.0", "no message", "no message", "pip install --force-reinstall --no-deps 'torchtune==0.6.1'"),
        ("0.15.0", BROKEN_TORCHAO, "cannot import", "pip install --force-reinstall --no-deps 'torchao==0.15.0'"),
    ],
)
def test_a_failed_import_names_what_happened_and_which_distribution_is_at_fault(version, output, what, fix):
    datasets = None if output == OTHER_MODULE else GOOD["datasets"]
    finding = check_import(output, versions(torchao=version, datasets=datasets))
    assert what in finding.found
    assert finding.fix == fix


def test_tune_of_this_python_is_right_and_another_on_path_is_named():
    assert check_tune("/venv/bin/tune", on_path="/venv/bin/tune") == Finding("tune", "/venv/bin/tune")
    for on_path, named in (("/usr/bin/tune", "PATH has /usr/bin/tune"), (None, "PATH has none")):
        finding = check_tune("/venv/bin/tune", on_path=on_path)
        assert finding.fix is None
        assert named in finding.found


def test_no_tune_of_this_python_is_wrong_even_with_another_on_path():
    for on_path in (None, "/usr/bin/tune"):
        assert check_tune(None, on_path=on_path).fix == "pip install --force-reinstall --no-deps 'torchtune==0.6.1'"


@pytest.mark.slow
def test_findings_are_one_aligned_line_each():
    lines = []
    assert check(lines.append)
    assert len({re.match(r".*?\S +ok     (?=\S)", line).end() for line in lines}) == 1
    assert {line.split("  ")[0] for line in lines} >= {
        "python",
        "torch",
        "torchtune",
        "import torchtune",
        "tune",
        "cpu",
    }
    assert str(Finding("longer", "2", "pip install 'x==3'")) == "WRONG  2; fix it with: pip install 'x==3'"


def test_what_is_installed_here_is_seen():
    assert [finding.subject for finding in check_versions()] == [
        finding.subject for finding in check_versions(versions())
    ]
    assert installed_version("torch") == torch.__version__
    assert installed_version("torchtune") == "0.6.1"
    assert installed_version("no-such-distribution") is None


def test_an_import_that_fails_in_its_own_process_gives_its_traceback():
    assert import_error("json") == ""
    assert "No module named 'no_such_module_at_all'" in import_error("no_such_module_at_all")


def test_devices_are_printed_with_their_memory_in_gib():
    found = list(check_devices())
    assert found[0].subject == "cpu"
    assert re.fullmatch(r"\d+\.\d GiB, \d+\.\d GiB of it available", found[0].found)
    assert len(found) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["torchao", "torch", "packaging"])
def test_the_command_ends_with_1_and_the_fix_where_a_distribution_is_broken(tmp_path, broken):
    (tmp_path / broken).mkdir()
    cause = {
        "torchao": "from torch import no_such_name",
        "torch": "raise OSError('libcudart.so')",
        "packaging": "import nothing",
    }
    (tmp_path / broken / "__init__.py").write_text(f"{cause[broken]}\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "adaptive_batch", "check"]
    finished = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 1, finished.stderr
    lines = [line for line in finished.stdout.splitlines() if "WRONG" in line]
    fixes = {line.split("  ")[0]: line.partition("fix it with: ")[2] for line in lines}
    again = "pip install --force-reinstall --no-deps"
    torch_again = f"{again} 'torch=={torch.__version__}'"
    if broken == "torchao":
        assert fixes == {"import torchtune": f"{again} 'torchao=={installed_version('torchao')}'"}
        assert "cannot import name 'no_such_name' from 'torch'" in lines[0]
    elif broken == "torch":
        assert fixes["torch"] == torch_again
        assert all("libcudart.so" in line for line in lines)
    else:
        assert fixes["packaging"].startswith("pip install --editable")

"""`adaptive-batch emulate` runs programs unchanged on an emulated device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.processes import run_python

pytestmark = pytest.mark.cuda_stack

EMULATE = ("-m", "adaptive_batch", "emulate")
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(3000, 256), nn.TransformerEncoderLayer(256, 4, batch_first=True),
    nn.Linear(256, 3000)
).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    rows = torch.randint(0, 3000, (8, 64 + step)).cuda()
    loss = F.cross_entropy(model(rows).flatten(0, 1), rows.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
"""


def emulate(
    folder: Path,
    program: str,
    *words: str,
    launcher: str = "",
    expect: int = 0,
    **variables: str,
) -> tuple[subprocess.CompletedProcess[str], dict]:
    (folder / "train.py").write_text(program)
    report = folder / "report.json"
    command = ("--", sys.executable, *launcher.split(), "train.py")
    words = (*EMULATE, "--device", "h100", *words, "--json", report, *command)
    done = run_python(*words, folder=folder, expect=expect, PYTHONPATH=str(ROOT), **variables)
    return done, json.loads(report.read_text())


def peaks(report: dict) -> list[tuple[int, int]]:
    return [
        (device["allocated"], device["reserved"])
        for process in report["processes"]
        for device in process["devices"]
    ]


SAME_AS_ON_THE_HOST = """
import torch
from torch.nn import functional as F

def same(compute):
    torch.manual_seed(3)
    results = []
    for device in ("cpu", "cuda"):
        x = torch.linspace(-2, 2, 60).view(6, 10).to(device)
        n = (torch.arange(60).view(6, 10) * 7 % 11).to(device)
        results.append(compute(x, n))
    host, there = results
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), host)

same(lambda x, n: x[n > 4])
same(lambda x, n: (n > 4).nonzero())
same(lambda x, n: torch.unique(n, return_counts=True)[1])
same(lambda x, n: torch.bincount(n.flatten()))
same(lambda x, n: x.topk(3)[1])
same(lambda x, n: 2 ** n)
same(lambda x, n: 2.5 ** x)
same(lambda x, n: x.abs() ** x)
same(lambda x, n: x * 2.5 + n / 3)
same(lambda x, n: torch.repeat_interleave(x[:, 0], n[:, 1]))
same(lambda x, n: torch.zeros(11, device=x.device).index_add_(0, n[0], x[0]))
same(lambda x, n: F.cross_entropy(x, n[:, 0] % 10, reduction="none"))
same(lambda x, n: torch.stack(torch._foreach_add([x, x.half()], 1)[:1]))
same(lambda x, n: torch.linalg.inv(x[:, :6] + 9 * torch.eye(6, device=x.device)))
counter = torch.tensor([3], device="cuda")
torch._foreach_add_([counter, torch.ones(1, device="cuda")], 1)
assert counter.item() == 4 and not torch.tensor([float("nan")]).cuda().isfinite().any()

torch.manual_seed(5)
first = torch.rand(4, device="cuda"), torch.randperm(9, device="cuda")
torch.manual_seed(5)
assert first[0].equal(torch.rand(4, device="cuda"))
assert first[1].equal(torch.randperm(9, device="cuda"))
assert sorted(first[1].tolist()) == list(range(9)) and first[0].unique().numel() == 4

# The memory of a result that is not computed is used again.
F.conv2d(*torch.ones(2, 1, 1, 2, 2, device="cuda"))
assert torch.arange(1, device="cuda").tolist() == [0]
"""


def test_small_tensors_have_the_values_of_the_cpu(tmp_path):
    _, report = emulate(tmp_path, SAME_AS_ON_THE_HOST)
    assert report["processes"][0]["made_up"] == []


SPARSE = """
import torch
x = torch.eye(4)
rows = torch.nn.Embedding(9, 3, sparse=True).cuda()
for make in (
    lambda: x.cuda().to_sparse(),
    lambda: x.to_sparse().cuda(),
    lambda: x.cuda().to_sparse_csr() @ x.cuda(),
    lambda: x.to_sparse_csr().cuda().to_dense(),
    lambda: rows(torch.tensor([1, 2, 1]).cuda()).sum().backward(),
):
    try:
        make()
    except NotImplementedError as error:
        assert "does not support sparse CUDA tensors" in str(error)
    else:
        raise AssertionError
"""


def test_sparse_tensors_on_the_device_are_refused(tmp_path):
    emulate(tmp_path, SPARSE)


NESTED = """
import torch
from torch import nn

rows = [torch.full((2, 8), 3.0), torch.full((3, 8), 3.0)]
nested = torch.nested.nested_tensor(rows, device="cuda")
assert [row.sum().item() for row in (nested * 2).unbind()] == [96, 144]
assert nested.to_padded_tensor(0).sum().item() > 0
# With a mask, the encoder converts padded rows to nested tensors and back.
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
mask = torch.tensor([[False, False, True], [False, False, False]]).cuda()
with torch.no_grad():
    states = encoder.cuda().eval()(torch.ones(2, 3, 8).cuda(), src_key_padding_mask=mask)
assert states.shape == (2, 3, 8) and states.sum().item() > 0
"""


def test_the_report_names_padded_nested_tensors_as_made_up(tmp_path):
    _, report = emulate(tmp_path, NESTED)
    made_up = {(origin, line) for _, origin, line, _ in report["processes"][0]["made_up"]}
    assert made_up == {("to_padded_tensor", "train.py:8"), ("to_padded_tensor", "train.py:14")}


DEFAULT_ON_CUDA = """
import torch
torch.set_default_tensor_type("torch.cuda.FloatTensor")
assert torch.unique(torch.arange(9) % 4).tolist() == [0, 1, 2, 3]
assert (2.0 ** torch.tensor([1.0, 2.0]))[torch.tensor([False, True])].item() == 4
assert torch.ones(0).sum().item() == 0
assert torch.randn(200, 200).argmax(1).tolist() == list(range(200))
assert torch.randn(200, 200).gt(0).nonzero().shape == (40_000, 2)
"""


def test_cuda_may_be_the_default_device(tmp_path):
    emulate(tmp_path, DEFAULT_ON_CUDA)


SCALES = """
import torch
for width, expected in ((3, 0.5), (300, None)):
    weight = torch.ones(width, width, device="cuda", requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), torch.amp.GradScaler("cuda")
    for loss in (weight.sum(), weight.sum() * 1e38):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert expected is None or weight.unique().tolist() == [expected]
    print(scaler.get_scale())
"""


def test_computed_gradients_that_overflow_skip_a_step(tmp_path):
    done, _ = emulate(tmp_path, SCALES)
    assert done.stdout.split() == ["32768.0", "65536.0"], done.stderr[-3000:]


# Backward accumulates in place if it holds the only reference.
ADDS_IN_PLACE = """
x = torch.ones(1000, 1000, device="cuda", requires_grad=True).sin()
((x * 2).sum() + (x * 3).sum() + (x * 4).sum()).backward()
print(torch.cuda.memory_stats()["allocation.all.allocated"])
"""


def test_peaks_are_the_same_to_the_byte_with_and_without_values(tmp_path):
    program = MODEL.replace(", error_if_nonfinite=True", "") + ADDS_IN_PLACE
    done, report = emulate(tmp_path, program)
    without, other = emulate(tmp_path, program, EMULATE_VALUES="0")
    assert peaks(report) == peaks(other) != []
    assert done.stdout.splitlines()[-1] == without.stdout.splitlines()[-1]


def test_the_report_lists_live_bytes_by_line(tmp_path):
    _, report = emulate(tmp_path, MODEL)
    (process,) = report["processes"]
    living = dict(process["living"]["lines"])
    assert process["living"]["bytes"] == pytest.approx(peaks(report)[0][0], rel=0.02)
    assert sum(living.values()) == process["living"]["bytes"]
    moments = 2 * 4 * sum([3000 * 256 * 2 + 3000, 1_315_072])
    assert living["optimizer: train.py:17"] == pytest.approx(moments, rel=0.01)


def test_the_report_names_the_line_of_an_oom(tmp_path):
    program = "import torch\nheld = torch.empty(60 * 2**30, dtype=torch.uint8, device='cuda')\n"
    done, report = emulate(tmp_path, program + "torch.empty_like(held)", expect=1)
    assert report["exit_status"] == 1
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 60.00 GiB" in done.stderr
    said = "Out of memory (number of times: 1), last at train.py:3: 60.000 GiB requested, 18."
    assert said in done.stderr


def test_a_limit_of_steps_ends_the_program(tmp_path):
    _, report = emulate(tmp_path, MODEL, "--steps", "2")
    assert report["processes"][0]["steps"] == 2


def test_a_time_limit_ends_the_program_with_a_report(tmp_path):
    program = MODEL.replace("range(4)", "range(10**9)")
    _, report = emulate(tmp_path, program, "--minutes", "0.3")
    assert report["ended_by_time_limit"]
    assert report["processes"][0]["steps"] > 2


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_background_program_with_a_report(sent, tmp_path):
    (tmp_path / "train.py").write_text("import time; print(1, flush=True); time.sleep(60)")
    (tmp_path / "temporary").mkdir()
    words = [*EMULATE, "--device", "h100", "--", sys.executable, "train.py"]
    program = subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    program.stdout.readline()
    program.send_signal(sent)
    assert "No process used CUDA." in program.communicate(timeout=50)[1]
    assert program.returncode == 130
    assert not list((tmp_path / "temporary").iterdir())


WRITES = """
import os, sqlite3, pathlib, torch
root = pathlib.Path(os.environ["PROJECT"])
torch.save({"w": torch.ones(3)}, root / "runs/model.pt")
with open("log.txt", "a") as file:
    file.write("emulated")
sqlite3.connect("trials.db").execute("create table t (x)").connection.commit()
os.system("echo of a shell >> shell.txt")
os.close(os.open("cut.txt", os.O_WRONLY | os.O_TRUNC))
os.truncate("log2.txt", 3)
os.chmod("mode.txt", 0o600)
pathlib.Path("new").mkdir()
pathlib.Path("new/a.txt").write_text(pathlib.Path("log.txt").read_text())
"""


@pytest.mark.parametrize("kept", [False, True])
def test_files_of_the_program_are_not_overwritten(tmp_path, kept):
    folder, output = tmp_path / "project", tmp_path / "output"
    (folder / "runs").mkdir(parents=True)
    texts = ("runs/model.pt", "log.txt", "shell.txt", "cut.txt", "log2.txt", "mode.txt")
    for name in (*texts, "trials.db"):
        (folder / name).write_text("" if name == "trials.db" else "precious ")
    words = ["--output", str(output)] if kept else []
    _, report = emulate(folder, WRITES, *words, PROJECT=str(folder))
    for name in texts:
        assert (folder / name).read_text() == "precious "
    assert (folder / "mode.txt").stat().st_mode & 0o077
    assert not (folder / "trials.db").read_text()
    assert not (folder / "new").exists()
    written = [name for name, _ in report["files"]]
    assert written == sorted(["new/a.txt", *texts, "trials.db"])
    assert output.exists() == kept
    if kept:
        assert (output / "new/a.txt").read_text() == "precious emulated"
        assert (output / "shell.txt").read_text() == "precious of a shell\n"


ROUTES = """
import torch
from torch import nn

torch.manual_seed(0)
router, experts = nn.Linear(512, 4).cuda(), [nn.Linear(512, 512).cuda() for _ in range(4)]
rows = torch.randn(2048, 512, device="cuda")
chosen = router(rows).topk(1)[1].squeeze(1)
kept = []
for number, expert in enumerate(experts):
    mine = (chosen == number).nonzero().squeeze(1)
    kept.append(expert(rows[mine]))
print([len(one) for one in kept])
"""


def test_a_shape_that_depends_on_missing_values_is_reported(tmp_path):
    done, report = emulate(tmp_path, ROUTES)
    assert "[512, 512, 512, 512]" in done.stdout
    assert ["shape", "addmm", "train.py:11"] in [
        one[:3] for one in report["processes"][0]["made_up"]
    ]
    assert "Shapes that depend on values that were not computed" in done.stderr
    everything = {"EMULATE_MAX_FLOATS": str(2**40), "EMULATE_COPIED_BYTES": str(2**40)}
    done, report = emulate(tmp_path, ROUTES, **everything)
    assert "[512, 512, 512, 512]" not in done.stdout
    assert report["processes"][0]["made_up"] == []


# trunc_normal_ draws until no element is out of bounds.
DRAWS_REPEATEDLY = """
import torch
weight = torch.empty(256, 256, device="cuda")
for bound in (2.0, 0.1):
    torch.nn.init.trunc_normal_(weight, a=-bound, b=bound)
print("drawn")
"""


def test_a_loop_that_depends_on_missing_values_ends(tmp_path):
    done, _ = emulate(tmp_path, DRAWS_REPEATEDLY, "--minutes", "2")
    assert done.stdout == "drawn\n", done.stderr[-3000:]


CHANGES_SHAPE = """
import torch
from torch import nn

torch.manual_seed(0)
head = nn.Linear(128, 4000).cuda()
for _ in range(3):
    hidden = torch.randn(16, 64, 128, device="cuda")
    labels = torch.where(torch.rand(16, 64) < 0.3, -100, 1).cuda()
    kept = labels != -100
    nn.functional.cross_entropy(head(hidden[kept]), labels[kept]).backward()
"""


def test_a_peak_that_depends_on_labels_is_exact(tmp_path):
    _, report = emulate(tmp_path, CHANGES_SHAPE)
    assert not [one for one in report["processes"][0]["made_up"] if one[0] == "shape"]
    everything = {"EMULATE_MAX_FLOATS": str(2**40), "EMULATE_COPIED_BYTES": str(2**40)}
    _, full = emulate(tmp_path, CHANGES_SHAPE, **everything)
    assert peaks(report) == peaks(full)


RANKS = """
import os, torch
from torch import distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
objects = [None, None]
dist.all_gather_object(objects, "x" * (rank + 1) * 2**20)
assert [len(one) for one in objects] == [2**20, 2**21]
held = torch.empty((rank + 1) * 2**28, dtype=torch.uint8, device=rank)
dist.destroy_process_group()
"""


def test_each_rank_is_reported(tmp_path):
    launcher = "-m torch.distributed.run --nproc_per_node 2"
    _, report = emulate(tmp_path, RANKS, "--devices", "2", launcher=launcher)
    by_rank = {process["rank"]: process["devices"] for process in report["processes"]}
    assert by_rank["0"][0]["allocated"] < by_rank["1"][-1]["allocated"]


LIBRARY = """
import torch
from torch import nn
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
start.record()
end.record()
assert 0 < start.elapsed_time(end) < 1000
pinned = torch.ones(3).pin_memory()
assert pinned.is_pinned() and not torch.ones(3).is_pinned()
graph = torch.cuda.CUDAGraph()
held = torch.ones(1000, device="cuda")
with torch.cuda.graph(graph):
    assert torch.cuda.is_current_stream_capturing()
    held + 1
graph.replay()
assert not torch.cuda.is_current_stream_capturing()
lstm = nn.LSTM(20, 30, 2, bidirectional=True, proj_size=10).cuda()
lstm(torch.randn(5, 3, 20).cuda())[0].sum().backward()
assert lstm.weight_hh_l0.grad.shape == (120, 10)
assert torch.cuda.device_count() == 1, torch.cuda.device_count()
"""


def test_other_cuda_libraries_work(tmp_path):
    program = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'" + LIBRARY
    _, report = emulate(tmp_path, program, "--devices", "2")
    assert "cudnnGetRNNTempSpaceSizes" in report["processes"][0]["not_counted"]


# torch.compile starts its workers in this way.
STARTS_A_WORKER = """
import os, subprocess, sys, torch
print(torch.cuda.is_available(), flush=True)
path = os.pathsep.join(sys.path)
look = [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"]
subprocess.run(look, env={**os.environ, "PYTHONPATH": path}, check=True)
"""


def test_a_sitecustomize_of_the_program_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('own sitecustomize')")
    (tmp_path / "train.py").write_text(STARTS_A_WORKER)
    device = ["--device", "24GiB", "--architecture", "sm_89"]
    done = run_python(
        *(*EMULATE, *device, "--", sys.executable, "train.py"),
        folder=tmp_path,
        PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}",
    )
    assert done.stdout.splitlines()[-4:] == ["own sitecustomize", "True"] * 2

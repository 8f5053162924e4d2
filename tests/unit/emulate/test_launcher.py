import os
import subprocess
import sys

import pytest

from adaptive_batch import SettingError
from adaptive_batch.__main__ import emulated_device, main
from adaptive_batch.emulate import EmulationError, launcher
from adaptive_batch.emulate.launcher import mirror, report_lines, written_files
from adaptive_batch.emulate.process import SOURCES, compile_preloaded_library


@pytest.mark.parametrize("text", ["24GiB", "24 gib", "25769803776B"])
def test_a_size_has_the_kernels_of_its_architecture(text):
    device = emulated_device(text, "sm_89")
    assert (device.total_bytes, device.capability) == (24 * 2**30, 89)
    assert device.multiprocessors > 0
    assert device.setting.count(",") == 3


@pytest.mark.parametrize(
    ("text", "architecture", "message"),
    [
        ("h1000", "sm_80", "--device='h1000': give a size .* H100"),
        ("400MiB", "sm_80", "--device='400MiB': the CUDA context needs more"),
        ("MI300X", "sm_80", "--device='MI300X': it does not run CUDA"),
        ("24GiB", "sm_999", "--architecture='sm_999': give one of sm_100, sm_120"),
    ],
)
def test_an_unknown_device_is_refused(text, architecture, message):
    with pytest.raises(SettingError, match=message):
        emulated_device(text, architecture)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device h100", "--device='h100': give "),
        ("--device h1000 -- python", "--device='h1000': give "),
        ("--device h100 --devices 17 -- python", "argument --devices: invalid choice: 17"),
        ("--device h100 --steps 0 -- python", "--steps=0: give 1 or more"),
        ("--device h100 --minutes -1 -- python", "--minutes=-1.0: give more than 0"),
        ("--device h100 --json missing/x.json -- python", "--json='missing/x.json': it cannot"),
        ("--device h100 --json read_only.json -- python", "--json='read_only.json': it cannot"),
        ("--device h100 --output . -- python", "--output='.': it is not empty"),
        ("--device h100 --output train.py -- python", "--output='train.py': File exists; give"),
        ("--device h100 --output /proc/x -- python", "--output='/proc/x': No such file"),
        ("--device h100 --output new --json new -- python", "--json='new': it cannot"),
        ("--device h100 --output new --json new/r --steps 0 -- python", "--steps=0: give 1"),
    ],
)
def test_an_invalid_option_is_refused_before_the_start(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "read_only.json").touch()
    # A refused start leaves its empty folder behind.
    (tmp_path / "new").mkdir()
    can_access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: "read_only" not in str(path) and can_access(path, mode)
    )
    with pytest.raises(SystemExit) as exit_:
        main(["emulate", *arguments.split()])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_the_list_has_the_devices_with_cuda(capsys):
    assert main(["emulate", "--list"]) == 0
    said = capsys.readouterr().out
    assert "H100           sm_90" in said
    assert "MI300X" not in said


GIB = 2**30


def report(**process):
    record = {
        "program": ["/home/me/train.py"],
        "rank": None,
        "steps": 3,
        "devices": [{"index": 0, "allocated": 2 * GIB, "reserved": 3 * GIB, "retries": 1}],
        "living": {"bytes": 2 * GIB, "device": 0, "lines": [["train.py:5", 2 * GIB]]},
        "out_of_memory": None,
        "times_out_of_memory": 0,
        "made_up": [],
        "not_counted": [],
    }
    return {
        "device": "NVIDIA H100",
        "total_bytes": 80 * GIB,
        "context_bytes": GIB,
        "seconds": 4.0,
        "processes": [record | process],
        "files": [],
        "folder": None,
        "ended_by_time_limit": False,
    }


def test_an_oom_is_reported_with_its_remedies():
    last = {
        "line": "a.py:1",
        "asked": 2 * GIB,
        "free": GIB,
        "allocated": 60 * GIB,
        "reserved": 70 * GIB,
    }
    lines = "\n".join(report_lines(report(out_of_memory=last, times_out_of_memory=2)))
    assert "(number of times: 2), last at a.py:1: 2.000 GiB requested, 1.000 GiB free" in lines
    assert "60.000 GiB were allocated, 70.000 GiB reserved" in lines
    for remedy in ("expandable_segments", "LoRA", "batch size"):
        assert remedy in lines


def test_inexact_parts_are_named():
    made_up = [["shape", "topk", "a.py:3", 7], ["value", "addmm", "a.py:9", 1]]
    lines = "\n".join(report_lines(report(made_up=made_up, not_counted=["cudnnX"])))
    assert "their peak is a guess: a.py:3 (topk)." in lines
    assert "they were not computed: a.py:9 (addmm)." in lines
    assert "cudnnX" in lines


@pytest.mark.parametrize(
    ("script", "minutes", "result"),
    [
        ("sleep 60", 0.01, (0, True)),
        ("sleep 1; kill -INT $PPID; sleep 60", None, (143, False)),
        ("sleep 1; kill -INT $PPID; sleep 60", 1, (143, False)),
        ("exit 3", 1, (3, False)),
    ],
)
@pytest.mark.usefixtures("usual_signal_handlers")
def test_ctrl_c_is_not_a_time_limit(script, minutes, result, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "SECONDS_TO_END", 0.2)
    command = ["sh", "-c", f"trap '' INT; {script}"]
    assert launcher._run(command, tmp_path, dict(os.environ), minutes) == result


def test_links_do_not_lead_the_mirror_round_in_a_circle(tmp_path):
    project, data, scratch = (tmp_path / name for name in ("project", "data", "project/out"))
    (project / "locked").mkdir(parents=True)
    (project / "locked").chmod(0)
    data.mkdir()
    for link, target in {"loop": ".", "up": "..", "data": data, "twice": data, "gone": "x"}.items():
        (project / link).symlink_to(target)
    assert list(mirror(project, scratch)) == [str(project), str(data)]
    assert sorted(path.name for path in scratch.iterdir()) == sorted(
        ["locked", "loop", "up", "data", "twice", "gone"]
    )
    assert (scratch / "loop").resolve() == scratch
    assert (scratch / "data").resolve() == (scratch / "twice").resolve()
    assert (scratch / "up").resolve() == tmp_path


@pytest.mark.parametrize("name", ["with a space.so", "with:colon.so"])
def test_a_library_that_cannot_be_preloaded_is_refused(name, tmp_path):
    compile_preloaded_library(tmp_path / "preloaded.so")
    with pytest.raises(EmulationError, match=r"your files cannot be protected: .*TMPDIR"):
        compile_preloaded_library(tmp_path / name)


@pytest.fixture(params=["", "-D_FORTIFY_SOURCE=3"])
def preloaded(request, tmp_path):
    """A project in the folder `own`, its mirror and the environment of a program."""
    library = tmp_path / "scratch.so"
    flags = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    command = ["gcc", *flags, *request.param.split(), SOURCES / "scratch.c", "-o", library, "-ldl"]
    subprocess.run(command, check=True)
    own, disk, scratch = tmp_path / "own", tmp_path / "disk", tmp_path / "scratch"
    elsewhere = tmp_path / "elsewhere"
    for folder in (own / "runs", own / ".cache/deep", own / "old", disk / "deep", elsewhere):
        folder.mkdir(parents=True)
    (elsewhere / "x").touch()
    (own / "disk").symlink_to(disk)
    (own / ".cache/elsewhere").symlink_to(elsewhere)
    for link, target in {"a": disk / "deep", "b": disk / "deep", "c": disk}.items():
        (own / link).symlink_to(target)
    names = (
        "log.txt",
        "log2.txt",
        "runs/model.pt",
        "old/x",
        ".cache/deep/x",
        "disk/y",
        "trials.db",
    )
    for name in names:
        (own / name).write_text("" if name == "trials.db" else "own")
    (own / "latest").symlink_to("runs/model.pt")
    folders = "".join(f"{one}\x1f{two}\x1f" for one, two in mirror(own, scratch).items())
    variables = {"EMULATE_SCRATCH": str(scratch), "EMULATE_FOLDERS": folders}
    return own, scratch, {**os.environ, **variables, "LD_PRELOAD": str(library)}


PRELUDE = """
def error_of(call, *arguments):
    '''Return the error number of a call that fails.'''
    try:
        call(*arguments)
    except OSError as error:
        return error.errno
    raise AssertionError(f"{call} did not fail")
"""


def run_program(text, preloaded, *words):
    own, scratch, environment = preloaded
    command = [sys.executable, "-c", PRELUDE + text, str(own), *words]
    subprocess.run(command, cwd=scratch, env=environment, check=True)


def state(folder):
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_mode, path.is_file() and path.read_bytes())
        for path in folder.rglob("*")
    }


CHANGES = """
import os, pathlib, shutil, sqlite3, subprocess, sys
root = pathlib.Path(sys.argv[1])
(root / "runs").mkdir(exist_ok=True)
(root / "runs/model.pt").write_text("new")
(root / "new/deep").mkdir(parents=True)
(root / "new/deep/a").write_text("a")
assert (root / "new/deep/a").read_text() == "a" and os.listdir(root / "new") == ["deep"]
shutil.copy2(root / "new/deep/a", root / "new/b")
with open(root / "log.txt", "a") as file:
    file.write("+")
os.utime("old/x", (1, 1))
os.chmod(root / "old/x", 0o600)
os.chmod(".cache", 0o700)
(root / ".cache/deep/x").write_text("changed")
pathlib.Path("disk/y").resolve().write_text("changed")
assert pathlib.Path("disk/y").read_text() == "changed"
assert not [entry for entry in os.scandir("old") if entry.is_symlink()]
shutil.copytree("old", root / "copied")
os.rename(root / "old", root / "older")
assert not (root / "old").exists() and (root / "older/x").stat().st_mtime == 1
os.chdir(root)
pathlib.Path("latest").write_text("linked")
os.symlink(root / "new/b", root / "mine")
with open("mine", "a") as file:
    file.write("b")
assert (root / "runs/model.pt").read_text() == "linked"
assert (root / "mine").resolve().read_text() == (root / "new/b").read_text() == "ab"
sqlite3.connect(f"file:{root}/trials.db?mode=rw", uri=True).execute("create table t (x)")
shell = "cd $0/new && echo s > s.txt && mv s.txt ../t.txt && sed -i s/o/x/ $0/log2.txt"
subprocess.run(["sh", "-c", f"{shell} && cp -a $0/runs $0/r", root], check=True)
os.link(root / ".cache/deep/x", "hard")
with open("hard", "a") as file:
    file.write("more")
"""


def test_absolute_paths_below_the_program_lead_to_its_mirror(preloaded):
    own, scratch, _ = preloaded
    before = state(own.parent / "disk"), state(own)
    run_program(CHANGES, preloaded)
    assert (state(own.parent / "disk"), state(own)) == before
    written = dict(written_files(scratch))
    assert " ".join(written) == (
        ".cache/deep/x copied/x disk/y hard log.txt log2.txt new/b new/deep/a older/x r/model.pt"
        " runs/model.pt t.txt trials.db"
    )
    assert written["trials.db"] > 0


APPENDS = "import sys; open('log.txt', 'a').write(sys.argv[1])"


def test_simultaneous_writes_are_kept_and_the_original_is_not_changed(preloaded):
    own, scratch, environment = preloaded
    programs = [
        subprocess.Popen([sys.executable, "-c", APPENDS, text], cwd=scratch, env=environment)
        for text in "abcd"
    ]
    assert [program.wait() for program in programs] == [0] * 4
    assert (own / "log.txt").read_text() == "own"
    written = (scratch / "log.txt").read_text()
    assert (written[:3], sorted(written[3:])) == ("own", list("abcd"))


@pytest.mark.parametrize("target", ["elsewhere", "own/../elsewhere"])
def test_a_removed_link_does_not_remove_what_it_leads_to(target, preloaded):
    own, scratch, environment = preloaded
    script = "ln -s $0 mine && test -L mine && test -L .cache/elsewhere && rm -r mine .cache"
    command = ["sh", "-c", script, own.parent / target]
    subprocess.run(command, cwd=scratch, env=environment, check=True)
    assert not (scratch / ".cache").exists()
    assert (own / ".cache/elsewhere/x").exists()


RENAMES = """
import os, pathlib, sys
root = pathlib.Path(sys.argv[1])
os.rename(root / ".cache", "hidden")
assert pathlib.Path("hidden/deep/x").read_text() == (root / "hidden/deep/x").read_text() == "own"
os.rename("runs", root.parent / "moved")
assert not (root.parent / "moved/model.pt").is_symlink()
(root.parent / "moved/model.pt").write_text("new")
"""


def test_a_renamed_folder_keeps_its_files(preloaded):
    own = preloaded[0]
    before = state(own)
    run_program(RENAMES, preloaded)
    assert state(own) == before
    assert (own.parent / "moved/model.pt").read_text() == "new"


REMOVES = """
import errno, os, sys
root = sys.argv[1]
assert error_of(os.unlink, f"{root}/.cache") == errno.EISDIR
assert error_of(os.unlink, ".cache/deep") == errno.EISDIR
assert error_of(os.rmdir, ".cache/deep") == errno.ENOTEMPTY
os.unlink(".cache/deep/x")
os.rmdir(".cache/deep")
assert os.listdir(".cache") == ["elsewhere"]
"""


def test_a_folder_that_is_linked_as_a_whole_is_removed_as_a_folder(preloaded):
    before = state(preloaded[0])
    run_program(REMOVES, preloaded)
    assert state(preloaded[0]) == before


NAMES = """
import os, pathlib, socket, sys
root = pathlib.Path(sys.argv[1])
(root / "new").mkdir()
assert (root / "new/../log.txt").read_text() == "own"
(root / "..new").mkdir()
(root / "..new/a").mkdir()
(root / "..new/a/b").touch()
assert os.path.exists("..new/a/b")
os.mknod(root / "pipe", 0o10600)
os.utime(root / "log.txt", (1, 1), follow_symlinks=False)
os.chmod(".cache/", 0o700)
file = os.open("log2.txt", os.O_RDONLY)
assert error_of(os.fchmod, file, 0o600)
assert error_of(os.utime, file, (1, 1))
server, client = (socket.socket(socket.AF_UNIX) for _ in range(2))
os.chdir(root)
server.bind("socket")
server.listen()
client.connect("socket")
"""


def test_names_of_new_entries_lead_to_the_mirror(preloaded):
    before = state(preloaded[0])
    run_program(NAMES, preloaded)
    assert state(preloaded[0]) == before
    assert (preloaded[1] / "socket").is_socket()


OPENS = """
import errno, sys
assert error_of(open, sys.argv[2], "w") == errno.ENAMETOOLONG
"""


def test_a_path_that_is_too_long_in_the_mirror_is_refused(preloaded):
    folder = str(preloaded[0] / ".cache/deep")
    while len(folder) < 3900:
        folder += "/" + 100 * "x"
    os.makedirs(folder)
    file = f"{folder}/".ljust(4095, "y")
    run_program(OPENS, preloaded, file)
    assert os.listdir(folder) == []


LINKS = """
import os
os.symlink("target", "link")
for flags in (os.O_CREAT | os.O_EXCL, os.O_NOFOLLOW):
    assert error_of(os.open, "link", os.O_WRONLY | flags)
    assert not os.path.lexists("target")
open("target", "w").close()
os.utime("target", (5, 5))
os.utime("link", (1, 1), follow_symlinks=False)
assert (os.stat("target").st_mtime, os.lstat("link").st_mtime) == (5, 1)
with open("link", "a") as file:
    file.write("more")
assert open("target").read() == "more" and os.path.islink("link")
"""


def test_links_of_the_program_stay_links(preloaded):
    run_program(LINKS, preloaded)


def test_a_folder_with_several_links_has_one_mirror(preloaded):
    scratch = preloaded[1]
    text = (
        "open('c/deep/z', 'w').write('n'); assert open('a/z').read() == open('b/z').read() == 'n'"
    )
    run_program(text, preloaded)
    assert (scratch / "a").resolve() == (scratch / "c/deep").resolve()

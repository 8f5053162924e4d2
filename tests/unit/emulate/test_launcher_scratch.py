"""The preloaded library that keeps emulated programs from writing to their own files."""

import os
import subprocess
import sys

import pytest

from adaptive_batch.emulate.process import SOURCES

APPENDS = "import sys; open('log.txt', 'a').write(sys.argv[1])"


@pytest.fixture(params=["", "-D_FORTIFY_SOURCE=3"])
def preloaded(request, tmp_path):
    library = tmp_path / "scratch.so"
    flags = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    command = ["gcc", *flags, *request.param.split(), SOURCES / "scratch.c", "-o", library, "-ldl"]
    subprocess.run(command, check=True)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    variables = {"LD_PRELOAD": str(library), "EMULATE_SCRATCH": str(scratch)}
    return scratch, {**os.environ, **variables}


def test_simultaneous_writes_are_kept_and_the_original_is_not_changed(preloaded, tmp_path):
    scratch, environment = preloaded
    own = tmp_path / "log.txt"
    own.write_text("own")
    (scratch / "log.txt").symlink_to(own)
    programs = [
        subprocess.Popen([sys.executable, "-c", APPENDS, text], cwd=scratch, env=environment)
        for text in "abcd"
    ]
    assert [program.wait() for program in programs] == [0] * 4
    assert own.read_text() == "own"
    written = (scratch / "log.txt").read_text()
    assert (written[:3], sorted(written[3:])) == ("own", list("abcd"))


def test_a_link_of_the_program_stays_a_link(preloaded):
    scratch, environment = preloaded
    script = "echo one > run.log; ln -s run.log latest.log; echo two >> latest.log; cat run.log"
    done = subprocess.run(
        ["sh", "-c", script], cwd=scratch, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "one\ntwo\n"
    assert (scratch / "latest.log").is_symlink()

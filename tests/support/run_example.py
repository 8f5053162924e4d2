"""Runs an example twice in one process, as its two commands do: with adaptive_batch, and without at
the same batch sizes.

python tests/support/run_example.py examples/plain_pytorch.py
"""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path


def output_of(example: Path, *arguments: object) -> str:
    """Return the output of the example."""
    sys.argv = [str(example), *map(str, arguments)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(example), run_name="__main__")
    return printed.getvalue()


def commanded_sizes(example: Path) -> list[str]:
    """The batch sizes that the example's own text gives for its second command."""
    return re.search(r"--plain ([\d ]+\d)", example.read_text())[1].split()


def both_outputs(example: Path, *, other_port: int | None = None) -> tuple[str, str]:
    """Return the outputs of the example with adaptive_batch and without; rank zero prints.

    Args:
        example: its file.
        other_port: on which the ranks meet the second time.
    """
    adaptive = output_of(example)
    printed = re.search(r"^batch sizes: (.*)$", adaptive, re.MULTILINE)
    if other_port is not None:
        os.environ["MASTER_PORT"] = str(other_port)
    return adaptive, output_of(
        example, "--plain", *(printed[1].split() if printed else commanded_sizes(example))
    )


if __name__ == "__main__":
    print("=====\n".join(both_outputs(Path(sys.argv[1]))), end="")

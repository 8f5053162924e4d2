"""The picture of an estimate."""

import html
import io
from fractions import Fraction

import pytest
from PIL import Image
from support.targets import counted

from adaptive_batch.estimate import Change, LengthEstimate, MemoryEstimate, Target
from adaptive_batch.estimate.fake_step import Resident
from adaptive_batch.memory import GIB, Line, MemoryCurve
from adaptive_batch.report import write_estimate_picture, write_report


def length_of(tokens):
    """An estimate of 4 GiB and half a GiB for each row, or 3.2 GiB and one."""
    lines = ((4.0, 0.5), (3.2, 1.0))
    curve = MemoryCurve(
        tuple(
            Line(Fraction(int(fixed * GIB)), Fraction(int(each * GIB)), number)
            for number, (fixed, each) in enumerate(lines)
        )
    )
    resident = Resident(GIB, GIB // 1000, 2 * GIB, GIB // 8)
    return LengthEstimate(tokens, resident, curve, curve.peak_bytes(1), 3 * GIB)


def estimate_of(*tokens):
    lengths = tuple(map(length_of, tokens))
    targets = [Target(name, 80 * GIB, gib * GIB) for name, gib in (("H100", 75), ("L4", 20))]
    return MemoryEstimate(
        tuple(counted(target, lengths, maximum=4096) for target in targets),
        4096,
        lengths=lengths,
        left_out=("a <thing>",),
        changes=(Change(("enable=True",), "more <compute>", (None, 30)),),
    )


@pytest.mark.parametrize("tokens", [(512,), (512, 1024, 2048)], ids=len)
def test_the_picture_is_not_blank(tmp_path, tokens):
    write_estimate_picture(estimate_of(*tokens), tmp_path / "estimate.png")
    picture = Image.open(io.BytesIO((tmp_path / "estimate.png").read_bytes())).convert("RGB")
    assert (picture.size[0] > 1000) == (len(tokens) > 1)
    colours = picture.getcolors(maxcolors=1 << 24)
    assert len({colour for count, colour in colours if count > 500}) >= 4


def test_an_estimate_alone_has_a_page_with_its_tables(tmp_path):
    estimate = estimate_of(512, 2048)
    estimate.save(tmp_path / "adaptive_batch" / "estimate.json")
    page = write_report(tmp_path)[0].read_text()
    assert html.escape(estimate.table()) in page
    assert "more &lt;compute&gt;" in page
    assert "left out: a &lt;thing&gt;" in page
    assert "<dt>steps</dt>" not in page

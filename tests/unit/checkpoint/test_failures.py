"""A save that fails blames the disk only where the disk may be to blame."""

import pytest

from adaptive_batch.checkpoint import saving
from adaptive_batch.errors import CheckpointError


@pytest.mark.parametrize(
    ("error", "blames_disk"),
    [
        (OSError(28, "No space left on device"), True),
        (RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/2"), True),
        (ValueError("Unknown target module vproj"), False),
        (KeyError("lora_rank"), False),
    ],
    ids=repr,
)
def test_the_cause_is_named_and_the_disk_where_it_may_be_it(tmp_path, error, blames_disk):
    target = tmp_path / "epoch_0"
    temporary = tmp_path / ".saving"

    def save():
        with saving(target, temporary, num_bytes=1000):
            temporary.mkdir()
            raise error

    with pytest.raises(CheckpointError) as raised:
        save()
    message = str(raised.value)
    assert message.startswith(f"saving {target} failed (")
    assert str(error.args[-1]) in message
    assert ("free disk space" in message) == blames_disk
    assert ("not a lack of space" in message) != blames_disk
    assert "earlier saves are unchanged" in message
    assert not temporary.exists()

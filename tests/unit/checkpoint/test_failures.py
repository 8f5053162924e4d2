"""A save that fails names its cause and the disk space, and leaves nothing."""

import pytest

from adaptive_batch.checkpoint import saving
from adaptive_batch.errors import CheckpointError


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (KeyError("lora_rank"), "KeyError: 'lora_rank'"),
    ],
    ids=repr,
)
def test_the_cause_and_the_space_are_named(tmp_path, error, cause):
    target = tmp_path / "epoch_0"
    temporary = tmp_path / ".saving"

    def save():
        with saving(target, temporary, num_bytes=1000):
            temporary.mkdir()
            raise error

    with pytest.raises(CheckpointError) as raised:
        save()
    message = str(raised.value)
    assert message.startswith(f"saving {target} failed ({cause}): it needs 1,000 bytes")
    assert "earlier saves are unchanged" in message
    assert not temporary.exists()

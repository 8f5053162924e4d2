"""torchtune's distillation recipes with correct gradients and logs; run as ``tune run
support/corrected_distillation.py --config NAME``.

The loss of a micro-batch is a mean over its tokens. The recipes divide gradients by the tokens of
the step, but do not multiply each loss by the tokens of its micro-batch.
"""

from __future__ import annotations

import os
from pathlib import Path

import torchtune

_BACKWARD = ("current_loss.backward()", "(current_loss * current_num_tokens).backward()")
CORRECTIONS = {
    "knowledge_distillation_single_device": (
        _BACKWARD,
        # On a CPU, these are the model's tensors, and a save would merge adapters into them.
        ("{k: v.cpu() for", "{k: v.cpu().clone() for"),
    ),
    "knowledge_distillation_distributed": (
        _BACKWARD,
        # The log would have the loss of one rank's last micro-batch, not the mean over the step.
        ("class_loss_to_log = class_loss.item()", "pass"),
        ("kd_loss_to_log = kd_loss.item()", "pass"),
        # The recipe flattens the student's logits, but not the teacher's.
        (
            "self._kd_loss_fn(logits, teacher_logits, labels)",
            "self._kd_loss_fn(logits, teacher_logits if isinstance(teacher_logits, list)"
            " else teacher_logits.flatten(0, 1), labels)",
        ),
    ),
}


def corrected(name: str) -> str:
    """Return the corrected text of a recipe of the installed torchtune."""
    text = (Path(torchtune.__file__).parents[1] / "recipes" / f"{name}.py").read_text()
    for line, correction in CORRECTIONS[name]:
        assert text.count(line) == 1, f"{name} has no line to correct: {line}"
        text = text.replace(line, correction)
    return text


if __name__ == "__main__":
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    kind = "distributed" if several else "single_device"
    exec(corrected(f"knowledge_distillation_{kind}"))

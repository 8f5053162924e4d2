"""torchtune's distillation recipes with those lines corrected that its gradients and logs depend
on; run as ``tune run support/corrected_distillation.py --config NAME``.

A part's loss is a mean over its tokens, which the recipes do not multiply by how many these are
before they divide gradients by the tokens of the step.
"""

from __future__ import annotations

import os
from pathlib import Path

import torchtune

_BACKWARD = ("current_loss.backward()", "(current_loss * current_num_tokens).backward()")
CORRECTIONS = {
    "knowledge_distillation_single_device": (
        _BACKWARD,
        # On a CPU these are the model's own tensors, into which adapters are merged as it is saved.
        ("{k: v.cpu() for", "{k: v.cpu().clone() for"),
    ),
    "knowledge_distillation_distributed": (
        _BACKWARD,
        # The losses of one rank's last part, in place of the means over the step.
        ("class_loss_to_log = class_loss.item()", "pass"),
        ("kd_loss_to_log = kd_loss.item()", "pass"),
        # Whole logits of the teacher keep their shape, and the student's do not.
        (
            "self._kd_loss_fn(logits, teacher_logits, labels)",
            "self._kd_loss_fn(logits, teacher_logits if isinstance(teacher_logits, list)"
            " else teacher_logits.flatten(0, 1), labels)",
        ),
    ),
}


def corrected(name: str) -> str:
    """Return the text of a recipe of the installed torchtune, corrected."""
    text = (Path(torchtune.__file__).parents[1] / "recipes" / f"{name}.py").read_text()
    for line, correction in CORRECTIONS[name]:
        assert text.count(line) == 1, f"{name} is another than was corrected: {line}"
        text = text.replace(line, correction)
    return text


if __name__ == "__main__":
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    kind = "distributed" if several else "single_device"
    exec(corrected(f"knowledge_distillation_{kind}"))

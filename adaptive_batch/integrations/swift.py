"""ms-swift callback that runs each training step in micro-batches.

    swift sft --external_plugins .../adaptive_batch/integrations/swift.py --callbacks adaptive_batch

Set the environment variable ``ADAPTIVE_BATCH_ARGUMENTS`` to the arguments of ``AdaptiveArguments``
as JSON. ``adaptive-batch run -- swift sft ...`` sets it and needs neither flag.
"""

from __future__ import annotations

import json
import os
from typing import Any

from swift.callbacks import TrainerCallback, callbacks_map

from adaptive_batch.integrations.transformers import AdaptiveArguments, adopt


class AdaptiveBatchCallback(TrainerCallback):
    """Adopts the trainer when training begins."""

    def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
        """Adopt the trainer.

        Raises:
            SettingError: a value is invalid.
        """
        given = json.loads(os.environ.get("ADAPTIVE_BATCH_ARGUMENTS", "{}"))
        adopt(self.trainer, AdaptiveArguments(**given))


callbacks_map["adaptive_batch"] = AdaptiveBatchCallback

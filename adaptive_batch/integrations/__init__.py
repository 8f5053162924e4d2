"""Integrations with the trainers of other libraries, imported on demand.

:mod:`.transformers` provides ``AdaptiveTrainer``, :mod:`.lightning` provides ``AdaptiveCallback``.
accelerate and Fabric need no integration: :class:`adaptive_batch.AdaptiveStep` calls the script's
own function.
"""

__all__: list[str] = []

"""Glue for the trainers of other libraries, each imported when it is used.

:mod:`.transformers` has ``AdaptiveTrainer``, and :mod:`.lightning` ``AdaptiveCallback``. accelerate
and Fabric need none: :class:`adaptive_batch.AdaptiveStep` calls the script's own function.
"""

__all__: list[str] = []

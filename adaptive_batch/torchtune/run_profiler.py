"""torchtune's profiler in a run, with the allocator's history while it is active."""

from __future__ import annotations

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune.training import PROFILER_KEY

from adaptive_batch import distributed
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import Progress

from .config_errors import instantiate

_COMPONENT = "torchtune.training.setup_torch_profiler"


class RunProfiler:
    """The profiler of a run, which does nothing unless it is enabled.

    Args:
        cfg: block ``profiler`` of the configuration; None for none.
        device: device of the run.

    Raises:
        SettingError: it is another one than torchtune's, or nothing can be profiled here.
    """

    def __init__(self, cfg: DictConfig | None, device: torch.device) -> None:
        # Null is as good as absent.
        given = {key: value for key, value in (cfg or {}).items() if value is not None}
        block = OmegaConf.create(given or {"enabled": False})
        if block.get("_component_", _COMPONENT) != _COMPONENT:
            remedy = f"only {_COMPONENT} works"
            raise SettingError("profiler._component_", block._component_, remedy)
        block["_component_"] = _COMPONENT
        self._profiler, self._cfg = instantiate(PROFILER_KEY, block)
        if self._cfg["enabled"]:
            available = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
            if not available.intersection(self._profiler.activities):
                remedy = "nothing else can be profiled here; set it to True, or enabled to False"
                raise SettingError("profiler.cpu", block.get("cpu"), remedy)
        profiles_memory = self._cfg["enabled"] and self._cfg.get("profile_memory", False)
        self._records_memory = (
            profiles_memory and device.type == "cuda" and distributed.is_rank_zero()
        )

    def start(self) -> None:
        """Start as training begins."""
        self._profiler.start()

    def begin_step(self, progress: Progress) -> None:
        """Record the CUDA allocator's history while the profiler is active in the first epoch, as
        torchtune does.
        """
        if not self._records_memory or progress.epoch:
            return
        step = progress.epoch_steps
        begin = self._cfg["wait_steps"] + self._cfg["warmup_steps"]
        if step == begin:
            torch.cuda.memory._record_memory_history()
        elif step == begin + self._cfg["active_steps"] + 1:
            torch.cuda.memory._record_memory_history(enabled=None)

    def end_step(self) -> None:
        """Tell the profiler that a step has ended."""
        self._profiler.step()

    def stop(self) -> None:
        """Stop as training ends."""
        self._profiler.stop()

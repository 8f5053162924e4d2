"""How a recipe's process begins and ends: its terminal, its configuration file, the ranks that were launched with it."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import training, utils

from adaptive_batch import distributed
from adaptive_batch.distributed import EXIT_STATUS, Watchdog
from adaptive_batch.errors import AdaptiveBatchError, RankLostError, SettingError
from adaptive_batch.training import differences

from .checks import check_parallel
from .config_errors import as_dict, check_file, plainly
from .configs import config_path, shipped_configs

log = logging.getLogger("adaptive_batch")

_INTERRUPTED = "interrupted; resume_from_checkpoint=True resumes from what was saved last"


def use_shipped_config(arguments: list[str]) -> None:
    """Replace the name of a shipped config after ``--config`` by its path, in place; refuse what is neither file nor shipped."""
    if "--config" not in arguments[:-1]:
        return
    index = arguments.index("--config") + 1
    name = arguments[index]
    if Path(name).is_file():
        check_file(name)
        return
    path = config_path(name)
    if path is None:
        names = ", ".join(name for name, _ in shipped_configs())
        raise SettingError("--config", name, f"there is no such file and no such shipped config; shipped are {names}")
    arguments[index] = str(path)


def set_up_terminal() -> None:
    """Show decisions as they are made, and the errors of this package as one line without a traceback."""
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    log.propagate = False
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        plain = None if "ADAPTIVE_BATCH_TRACEBACK" in os.environ else plainly(error)
        if plain is not None:
            print(f"\n{type(plain).__name__}: {plain}", file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt) and "ADAPTIVE_BATCH_TRACEBACK" not in os.environ:
            print(f"\n{_INTERRUPTED}", file=sys.stderr)
        else:
            usual(kind, error, trace)

    sys.excepthook = hook


@contextmanager
def all_ranks(cfg: DictConfig) -> Iterator[Watchdog | None]:
    """Inside, the ranks that were launched are one process group, and an error of one rank ends all of them, with one message.

    Yields the watchdog of this rank, or None where only this process was launched.
    """
    if not distributed.is_launched():
        check_parallel(cfg, world_size=1)
        with _no_early_success():
            yield None
        return
    if int(os.environ["RANK"]):
        for name in ("adaptive_batch", "torchtune"):  # rank zero logs for all
            logging.getLogger(name).setLevel(logging.ERROR)
    watch = Watchdog()
    watch.start()
    try:
        _check_same(cfg)
        _begin_group(cfg, ranks_of_a_model=check_parallel(cfg, world_size=int(os.environ["WORLD_SIZE"])))
        with _no_early_success():
            yield watch
    except SystemExit as ended:
        if ended.code != EXIT_STATUS:
            watch.fail(f"it was ended with status {ended.code}")
        watch.stop()
        raise
    except KeyboardInterrupt:
        watch.fail(_INTERRUPTED)
    except BaseException as error:
        facts = error.facts if isinstance(error, RankLostError) else {}
        kind = "out_of_memory" if "limit" in facts else "error"
        watch.fail(plainly(error) or error, kind=kind, facts=facts)
    watch.stop()
    distributed.destroy_process_group()


@contextmanager
def _no_early_success() -> Iterator[None]:
    """Inside, ``sys.exit()`` or ``sys.exit(0)``, as a loss or a dataset may call it, is an error: the run is not over."""
    try:
        yield
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
        where = traceback.extract_tb(ended.__traceback__)[-1]
        message = (
            f"{where.filename}:{where.lineno} ({where.name}) ended the process with status 0 before the run was over"
        )
        raise AdaptiveBatchError(f"{message}; return there, or raise an error that says what is wrong") from ended


def _begin_group(cfg: DictConfig, *, ranks_of_a_model: int) -> None:
    try:
        device = utils.get_device(device=cfg.device)
    except RuntimeError as error:
        machine = f"rank {os.environ['RANK']} is number {os.environ.get('LOCAL_RANK', 0)} of its machine"
        remedy = f"{machine}: {error}; start as many ranks on each machine as it has devices (--nproc_per_node)"
        raise SettingError("device", cfg.device, remedy) from error
    on_host = bool(cfg.get("fsdp_cpu_offload", False)) or bool(cfg.get("enable_async_checkpointing", False))
    distributed.init_process_group(
        training.get_distributed_backend(device.type, offload_ops_to_cpu=on_host and device.type != "cpu"),
        ranks_of_a_model=ranks_of_a_model,
    )
    if cfg.get("fsdp_cpu_offload", False):
        training.set_torch_num_threads()


def _check_same(cfg: DictConfig) -> None:
    """Refuse ranks that were started with different configurations or versions.

    They are compared in the store: the process group itself depends on the configuration, and one that ranks begin
    differently is waited for.
    """
    mine = {key: json.dumps(value, sort_keys=True, default=str) for key, value in as_dict(cfg).items()}
    mine |= {"torch": torch.__version__}
    store, rank, _ = distributed.meet_ranks()
    if rank == 0:
        store.set("configuration", json.dumps(mine))
        return
    for key, value, first in differences(mine, json.loads(store.get("configuration"))):
        whose = f"rank {rank} was started with this, and rank 0 with {first}"
        raise SettingError(key, value, f"{whose}; start all ranks with the same configuration")

"""Start and end of a recipe's process: terminal, configuration file and launched ranks."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import torch
from omegaconf import DictConfig
from torchtune import config, training, utils

from adaptive_batch import distributed
from adaptive_batch.config_files import config_files
from adaptive_batch.distributed import EXIT_STATUS, Terminated, Watchdog, raising_on_request
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.memory import expand_segments
from adaptive_batch.training import differences

from .checks import check_parallel
from .configuration import as_dict, check_file, plainly, refusing
from .store import FinishedError

log = logging.getLogger("adaptive_batch")

_INTERRUPTED = "interrupted"


def run_recipe(recipe_main: Callable[[DictConfig], object]) -> None:
    """Run a recipe as a program, with the configuration of its command line."""
    # Exclude imported objects from garbage collection, which runs after each trial. A second run of
    # this process would also exclude the garbage of the first.
    if not gc.get_freeze_count():
        gc.freeze()
    set_up_process()
    use_shipped_config(sys.argv)
    sys.exit(config.parse(recipe_main)())


def use_shipped_config(arguments: list[str]) -> None:
    """Replace the name of a shipped config after ``--config`` by its path, in place.

    Raises:
        SettingError: the name is neither a file nor a shipped config, or torchtune cannot read
            another argument.
    """
    if "--config" not in arguments[:-1]:
        return
    index = arguments.index("--config") + 1
    name = arguments[index]
    overrides = [*arguments[1 : index - 1], *arguments[index + 1 :]]
    path = Path(name)
    if not path.is_file():
        files = config_files()
        if name not in files:
            remedy = f"it is neither a file nor a shipped config; shipped are {', '.join(files)}"
            raise SettingError("--config", name, remedy)
        path = files[name]
    check_file(str(path), [override for override in overrides if not override.startswith("-")])
    arguments[index] = str(path)


def set_up_process() -> None:
    """Set up logging, errors on one line and expandable segments."""
    expand_segments()
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    log.propagate = False
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if "ADAPTIVE_BATCH_TRACEBACK" in os.environ:
            usual(kind, error, trace)
            return
        plain = plainly(error)
        if plain is not None:
            print(f"\n{type(plain).__name__}: {plain}", file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            print(f"\n{str(error) or _INTERRUPTED}", file=sys.stderr)
        else:
            usual(kind, error, trace)

    sys.excepthook = hook


def show_details(cfg: DictConfig, *, recipe_name: str) -> None:
    """Print the resolved configuration and torchtune's log if ``verbose=True``; else only
    torchtune's warnings, and without a terminal no progress bars of `datasets`.
    """
    torchtunes = utils.get_logger()
    if cfg.get("verbose"):
        torchtunes.removeFilter(_is_warning)
        if distributed.is_rank_zero():
            config.log_config(recipe_name=recipe_name, cfg=cfg)
        return
    torchtunes.addFilter(_is_warning)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


def _is_warning(record: logging.LogRecord) -> bool:
    # torchtune warns that the profiler is off, as it is by default.
    return record.levelno >= logging.WARNING and "Profiling disabled" not in record.getMessage()


@contextmanager
def no_component_exits() -> Iterator[None]:
    """Context manager: raise an error if a component, such as a dataset, calls ``sys.exit``."""
    try:
        yield
    except SystemExit as ended:
        # Training has saved, and ends as it was asked to.
        if ended.code == EXIT_STATUS:
            raise
        *_, where = traceback.extract_tb(ended.__traceback__)
        place = f"{where.name} ({where.filename}:{where.lineno})"
        remedy = "nothing was trained or saved after it; let it return or raise an error"
        raise AdaptiveBatchError(
            f"sys.exit({ended.code!r}) was called in {place}: {remedy}"
        ) from ended


@contextmanager
def interruptible(after_end: Callable[[], str]) -> Iterator[None]:
    """Context manager: end at Ctrl-C, SIGTERM or SIGHUP with a line on how to resume.

    Args:
        after_end: function that returns this line.

    Raises:
        KeyboardInterrupt: Ctrl-C, or a signal on several ranks; it has the line.
        SystemExit: another signal in a single process; its status is 75.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        is_request = isinstance(error, Terminated)
        cause = _INTERRUPTED
        if is_request:
            cause = "stop requested"
        message = f"{cause}: {after_end()}"
        if is_request and not distributed.is_launched():
            log.info("%s", message)
            raise SystemExit(EXIT_STATUS) from None
        raise KeyboardInterrupt(message) from None


@contextmanager
def all_ranks(cfg: DictConfig) -> Iterator[Watchdog | None]:
    """Context manager: join the launched ranks in a process group; an error of one rank ends all.

    Yields:
        The watchdog of this rank; None for a single process.
    """
    if not distributed.is_launched():
        check_parallel(cfg, world_size=1)
        with no_component_exits():
            yield None
        return
    if int(os.environ["RANK"]):
        # Rank zero logs for all.
        for name in ("adaptive_batch", "torchtune"):
            logging.getLogger(name).setLevel(logging.ERROR)
    watch = Watchdog()
    try:
        _check_same(cfg)
        _begin_group(
            cfg, ranks_of_a_model=check_parallel(cfg, world_size=int(os.environ["WORLD_SIZE"]))
        )
        with no_component_exits():
            yield watch
    # A failure ends the process here.
    except KeyboardInterrupt as error:
        watch.fail(str(error) or _INTERRUPTED)
    except Exception as error:
        watch.fail(plainly(error) or error)
    watch.close()
    distributed.destroy_process_group()


def run_training(cfg: DictConfig, make_recipe: Callable[[Watchdog | None], Any]) -> None:
    """Set up, train and clean up a recipe on the launched ranks.

    Args:
        cfg: the configuration: YAML and key=value.
        make_recipe: function that makes the recipe, given the watchdog of this rank, if any.
    """
    recipe = None
    try:
        with all_ranks(cfg) as watch:
            show_details(cfg, recipe_name=Path(sys.argv[0]).stem)
            recipe = make_recipe(watch)
            try:
                with interruptible(recipe.after_end):
                    with raising_on_request():
                        recipe.setup()
                    recipe.train()
            except FinishedError as done:
                # A job that is started again by the same command must not fail.
                log.info("%s", done)
    finally:
        if recipe:
            recipe.cleanup()


def _begin_group(cfg: DictConfig, *, ranks_of_a_model: int) -> None:
    problem = f"rank {os.environ['RANK']} cannot use it"
    remedy = "start as many ranks on each machine as it has devices (--nproc_per_node)"
    with refusing("device", cfg.device, remedy, problem=problem):
        device = utils.get_device(device=cfg.device)
    offloads = bool(cfg.get("fsdp_cpu_offload", False))
    # Both send tensors of the host, which NCCL cannot.
    on_host = offloads or bool(cfg.get("enable_async_checkpointing", False))
    distributed.init_process_group(
        training.get_distributed_backend(
            device.type, offload_ops_to_cpu=on_host and device.type != "cpu"
        ),
        ranks_of_a_model=ranks_of_a_model,
    )
    if offloads:
        training.set_torch_num_threads()


def _check_same(cfg: DictConfig) -> None:
    """Raise SettingError if ranks were started with different configurations or versions.

    They are compared in the store, as ranks with different configurations may wait forever for
    their process group.
    """
    own = {
        key: json.dumps(value, sort_keys=True, default=str) for key, value in as_dict(cfg).items()
    }
    own["torch"] = torch.__version__
    store, rank, _ = distributed.meet_ranks()
    if rank == 0:
        store.set("configuration", json.dumps(own))
        return
    for key, value, first in differences(own, json.loads(store.get("configuration"))):
        whose = f"rank {rank} was started with this, and rank 0 with {first}"
        raise SettingError(key, value, f"{whose}; start all ranks with the same configuration")

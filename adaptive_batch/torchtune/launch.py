"""Start and end of a recipe's process: terminal, configuration file and launched ranks."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config, training, utils
from torchtune.config._parse import TuneRecipeArgumentParser

from adaptive_batch import distributed
from adaptive_batch._util import is_emulated
from adaptive_batch.config_files import config_files
from adaptive_batch.distributed import EXIT_STATUS, Terminated, Watchdog, raising_on_request
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.memory import expand_segments
from adaptive_batch.training import differences

from .checks import check_parallel
from .configuration import as_dict, merged, plainly, refusing
from .store import FinishedError

log = logging.getLogger("adaptive_batch")

_INTERRUPTED = "interrupted"


def run_recipe(recipe_main: Callable[[DictConfig], object]) -> None:
    """Run a recipe as a program, with the configuration of its command line.

    Raises:
        SettingError: an argument or the configuration file cannot be read.
    """
    set_up_process()
    use_shipped_config(sys.argv)
    parser = TuneRecipeArgumentParser(description=recipe_main.__doc__)
    remedy = "give --config and key=value arguments, and close all brackets and quotes"
    with refusing("arguments", shlex.join(sys.argv[1:]), remedy, problem="they cannot be read"):
        namespace, overrides = parser.parse_known_args()
        cfg = merged(OmegaConf.create(vars(namespace)), overrides)
    recipe_main(cfg)


def use_shipped_config(arguments: list[str]) -> None:
    """Replace the name of a shipped config after ``--config`` by its path, in place.

    Args:
        arguments: name of the program and its arguments, as in ``sys.argv``.

    Raises:
        SettingError: the name is neither a file nor a shipped config.
    """
    # Without a value after --config, torchtune's parser prints the usage.
    if "--config" not in arguments[:-1]:
        return
    index = arguments.index("--config") + 1
    name = arguments[index]
    if Path(name).is_file():
        return
    shipped = config_files()
    if name not in shipped:
        remedy = f"it is neither a file nor a shipped config; shipped are {', '.join(shipped)}"
        raise SettingError("--config", name, remedy)
    arguments[index] = str(shipped[name])


def set_up_process() -> None:
    """Set up logging, errors on one line and expandable segments."""
    expand_segments()
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    # Handlers of the root logger would print each line again.
    log.propagate = False
    print_traceback = sys.excepthook

    def print_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        plain_error = plainly(error)
        if "ADAPTIVE_BATCH_TRACEBACK" in os.environ:
            print_traceback(kind, error, trace)
        elif plain_error is not None:
            print(f"\n{type(plain_error).__name__}: {plain_error}", file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            print(f"\n{str(error) or _INTERRUPTED}", file=sys.stderr)
        else:
            print_traceback(kind, error, trace)

    sys.excepthook = print_error


def show_details(cfg: DictConfig, *, recipe_name: str) -> None:
    """With ``verbose=True``, print the resolved configuration and torchtune's log. Otherwise print
    only torchtune's warnings.
    """
    torchtune_log = utils.get_logger()
    if cfg.get("verbose"):
        torchtune_log.removeFilter(_is_warning)
        if distributed.is_rank_zero():
            config.log_config(recipe_name=recipe_name, cfg=cfg)
    else:
        torchtune_log.addFilter(_is_warning)


def _is_warning(record: logging.LogRecord) -> bool:
    # torchtune also warns that the profiler is off, which is the default and no problem.
    return record.levelno >= logging.WARNING and "Profiling disabled" not in record.getMessage()


@contextmanager
def no_component_exits() -> Iterator[None]:
    """Context manager: raise an error if a component, such as a dataset, calls ``sys.exit``. With
    status 0, the run would look finished.
    """
    try:
        yield
    except SystemExit as error:
        # Our own exits: a requested stop, after training was saved, and `emulate --steps`.
        if error.code == EXIT_STATUS or is_emulated():
            raise
        *_, caller = traceback.extract_tb(error.__traceback__)
        place = f"{caller.name} ({caller.filename}:{caller.lineno})"
        remedy = "nothing was trained or saved after it; let it return or raise an error"
        raise AdaptiveBatchError(
            f"sys.exit({error.code!r}) was called in {place}: {remedy}"
        ) from error


@contextmanager
def interruptible(resume_hint: Callable[[], str]) -> Iterator[None]:
    """Context manager: end at Ctrl-C, SIGTERM or SIGHUP with a line on how to resume.

    Args:
        resume_hint: function that returns how to resume.

    Raises:
        KeyboardInterrupt: Ctrl-C, or a signal on several ranks; its message has the line.
        SystemExit: another signal in a single process; its status is 75.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        # A subclass of KeyboardInterrupt for SIGTERM and SIGHUP.
        is_signal = isinstance(error, Terminated)
        message = f"{'stop requested' if is_signal else _INTERRUPTED}: {resume_hint()}"
        # On several ranks, all_ranks() ends the others with this message.
        if is_signal and not distributed.is_launched():
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
    # Rank 0 logs for all.
    if int(os.environ["RANK"]) > 0:
        for name in ("adaptive_batch", "torchtune"):
            logging.getLogger(name).setLevel(logging.ERROR)
    watch = Watchdog()
    try:
        _check_same(cfg)
        ranks_of_a_model = check_parallel(cfg, world_size=int(os.environ["WORLD_SIZE"]))
        _begin_group(cfg, ranks_of_a_model=ranks_of_a_model)
        with no_component_exits():
            yield watch
    # fail() ends the process and never returns. If the process group ended first, the other ranks
    # would report its end instead of this error.
    except KeyboardInterrupt as error:
        watch.fail(str(error) or _INTERRUPTED)
    except Exception as error:
        watch.fail(plainly(error) or error)
    watch.close()
    distributed.destroy_process_group()


def run_training(cfg: DictConfig, make_recipe: Callable[[Watchdog | None], Any]) -> None:
    """Set up, train and clean up a recipe on the launched ranks.

    Args:
        cfg: configuration from YAML and key=value arguments.
        make_recipe: function that makes the recipe, given the watchdog of this rank, if any.
    """
    recipe = None
    try:
        with all_ranks(cfg) as watch:
            show_details(cfg, recipe_name=Path(sys.argv[0]).stem)
            recipe = make_recipe(watch)
            try:
                with interruptible(recipe.resume_hint):
                    # A signal ends setup() at once. train() handles signals itself: it finishes
                    # and saves the step.
                    with raising_on_request():
                        recipe.setup()
                    recipe.train()
            except FinishedError as done:
                # Not an error: a job that repeats its command until it succeeds must not fail after
                # the run is finished.
                log.info("%s", done)
    finally:
        if recipe:
            recipe.cleanup()


def _begin_group(cfg: DictConfig, *, ranks_of_a_model: int) -> None:
    """Join the process group with the backends that the configuration needs."""
    # Raises if this machine has fewer devices than ranks.
    device = utils.get_device(device=cfg.device)
    offloads = bool(cfg.get("fsdp_cpu_offload", False))
    # Both keys send tensors in host memory, for which NCCL needs a second backend.
    sends_host_tensors = offloads or bool(cfg.get("enable_async_checkpointing", False))
    backend = training.get_distributed_backend(
        device.type, offload_ops_to_cpu=sends_host_tensors and device.type != "cpu"
    )
    distributed.init_process_group(backend, ranks_of_a_model=ranks_of_a_model)
    # The optimizer runs on the CPU, where torchrun leaves each rank a single thread.
    if offloads:
        training.set_torch_num_threads()


def _check_same(cfg: DictConfig) -> None:
    """Raise SettingError if ranks were started with different configurations or versions.

    They are compared in the store before the process group begins: ranks with different
    configurations may wait forever for their process group.
    """
    own = {
        key: json.dumps(value, sort_keys=True, default=str) for key, value in as_dict(cfg).items()
    }
    own["torch"] = torch.__version__
    store, rank, _ = distributed.meet_ranks()
    if rank == 0:
        store.set("configuration", json.dumps(own))
        return
    # get() waits for rank 0.
    of_rank_zero = json.loads(store.get("configuration"))
    for key, value, value_of_rank_zero in differences(own, of_rank_zero):
        whose = f"rank {rank} was started with this, and rank 0 with {value_of_rank_zero}"
        raise SettingError(key, value, f"{whose}; start all ranks with the same configuration")

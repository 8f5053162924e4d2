"""Several ranks that act as one: their process group, what is checked before it is used, and that none is left waiting."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import training, utils

from adaptive_batch import distributed
from adaptive_batch._util import check_bool, check_whole
from adaptive_batch.distributed import EXIT_STATUS, Watchdog
from adaptive_batch.errors import RankLostError, SettingError
from adaptive_batch.training import differences

from .requirements import plainly
from .settings import Settings

# Optimizers whose kernels want the parameters on the device.
_NEEDS_THE_DEVICE = ("bitsandbytes.", "torchao.optim.CPUOffloadOptimizer")


@contextmanager
def all_ranks(cfg: DictConfig) -> Iterator[Watchdog | None]:
    """Inside, the ranks that were launched are one process group, and an error of one rank ends all of them, with one message.

    Args:
        cfg: the recipe's configuration.

    Yields:
        The watch over this rank; None where only this process was launched.

    Raises:
        SettingError: what is configured for several ranks cannot be used.
    """
    if not distributed.is_launched():
        check_parallel(cfg)
        yield None
        return
    if int(os.environ["RANK"]):
        for name in ("adaptive_batch", "torchtune"):  # rank zero says it for all
            logging.getLogger(name).setLevel(logging.ERROR)
    watch = Watchdog()
    watch.start()
    try:
        _check_same(cfg)
        _begin_group(cfg, ranks_of_a_model=check_parallel(cfg))
        yield watch
    except SystemExit as ended:
        if ended.code not in (None, 0, EXIT_STATUS):
            watch.fail(f"it was ended with status {ended.code}")
        watch.stop()
        raise
    except KeyboardInterrupt:
        watch.fail("interrupted; resume_from_checkpoint=True goes on from what was saved last")
    except BaseException as error:
        facts = error.facts if isinstance(error, RankLostError) else {}
        kind = "out_of_memory" if "capacity" in facts else "error"
        watch.fail(plainly(error) or error, kind=kind, facts=facts)
    watch.stop()
    distributed.destroy_process_group()


def check_parallel(cfg: DictConfig, *, world_size: int | None = None) -> int:
    """Refuse what is configured for several ranks and cannot be used.

    Args:
        cfg: the recipe's configuration.
        world_size: ranks; None for those that were launched.

    Returns:
        How many ranks hold one copy of the model.

    Raises:
        SettingError: naming the key.
    """
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", 1)) if distributed.is_launched() else 1
    dim = cfg.get("tensor_parallel_dim", None)
    dim = 1 if dim is None else check_whole("tensor_parallel_dim", dim)
    if world_size % dim:
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise SettingError("tensor_parallel_dim", dim, f"it must divide the {world_size} ranks; give one of {divisors}")
    if dim > 1:
        if cfg.get("tensor_parallel_plan", None) is None:
            remedy = "tensor parallelism needs a plan, such as tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan"
            raise SettingError("tensor_parallel_plan", None, remedy)
        if cfg.optimizer.get("fused", False):
            raise SettingError("optimizer.fused", True, "tensor parallelism needs optimizer.fused=False")
    if world_size > 1 and cfg.optimizer.get("fused", False) and str(cfg.optimizer._component_) == "torch.optim.SGD":
        raise SettingError("optimizer.fused", True, "torch steps no parameters of several ranks so; set it to False")
    for key in ("fsdp_cpu_offload", "fsdp_reshard_after_forward"):
        if cfg.get(key, None) is not None:
            check_bool(key, cfg.get(key))
    if world_size > 1 and cfg.get("fsdp_cpu_offload", False):
        component = str(cfg.optimizer._component_)
        if str(cfg.device).startswith("cpu"):
            raise SettingError(
                "fsdp_cpu_offload", True, "device is cpu, where everything lies on the host; set it to False"
            )
        if component.startswith(_NEEDS_THE_DEVICE):
            remedy = (
                f"{component} cannot step parameters that lie on the host; set it to False, or take torch.optim.AdamW"
            )
            raise SettingError("fsdp_cpu_offload", True, f"{remedy} with fused=True")
    return dim


def _begin_group(cfg: DictConfig, *, ranks_of_a_model: int) -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    try:
        device = utils.get_device(device=cfg.device)
    except RuntimeError as error:
        machine = f"rank {os.environ['RANK']} is number {local_rank} of its machine"
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
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    mine = {str(key): json.dumps(value, sort_keys=True, default=str) for key, value in plain.items()}
    mine |= {"torch": torch.__version__}
    store, rank, _ = distributed.meet_ranks()
    if rank == 0:
        store.set("configuration", json.dumps(mine))
        return
    for key, value, first in differences(mine, json.loads(store.get("configuration"))):
        whose = f"rank {rank} was started with this, and rank 0 with {first}"
        raise SettingError(key, value, f"{whose}; start all ranks with the same configuration")


def check_fewer_ranks(settings: Settings, *, began_on: int) -> None:
    """Refuse to go on with fewer ranks where a rank would have to split its rows and cannot.

    Raises:
        SettingError: naming how many would do.
    """
    ranks = distributed.data_parallel_size()
    if settings.optimizer_in_bwd and ranks < began_on:
        raise SettingError(
            "optimizer_in_bwd",
            True,
            f"the checkpoint's steps were dealt to {began_on} ranks; {ranks} would have to hold more rows than batch_size each, and "
            f"cannot split them; start {began_on} or more, or begin anew with optimizer_in_bwd=False",
        )


def describe_ranks(*, began_on: int, step_rows: int) -> str:
    """How steps go on where another number of ranks began the run.

    Args:
        began_on: ranks when the run began.
        step_rows: of a step on all of them; 0 where it holds tokens.
    """
    ranks = distributed.data_parallel_size()
    least, more = divmod(step_rows, ranks)
    holds = "1 holds" if ranks - more == 1 else f"{ranks - more} hold"
    larger = "1 of them holds" if more == 1 else f"{more} of them hold"
    shares = f"{larger} {_rows(least + 1)} of the {step_rows} of a step, and {holds} {_rows(least)}"
    if not more:
        shares = f"each holds {_rows(least)} of the {step_rows} of a step"
    if not step_rows:
        shares = "the rows of each step are dealt to them by their tokens"
    batches = "batches, their order and the learning rate go on as they were"
    return f"{ranks} {'ranks' if ranks > 1 else 'rank'}, and {began_on} began the run: {batches}; {shares}"


def _rows(number: int) -> str:
    return f"{number} row" if number == 1 else f"{number} rows"

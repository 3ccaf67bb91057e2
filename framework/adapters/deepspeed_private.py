"""Private names of DeepSpeed, each with the reason; `tests/contract/test_private_apis.py` notices when one moves.

`deepspeed` is imported inside the functions only: it takes seconds, and the extra may not be installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from framework.errors import RunFailedError


@contextmanager
def building(allowed: bool, say: Callable[[str], None]) -> Generator[None, None, None]:
    """Inside, no C++ operator is compiled without a word: it is announced if `allowed`, else the run stops.

    DeepSpeed compiles an operator when something first asks for it, which takes minutes; on CPU `init_distributed`
    always asks for `deepspeed_shm_comm`, an all-reduce for the ranks of one host. That one is left out: everything
    works without it, and a process that is killed meanwhile leaves a lock on which every later run waits for ever.
    """
    communication: Any = importlib.import_module("deepspeed.comm.torch")
    builder: Any = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder
    build_shm_op, jit_load = communication.build_shm_op, builder.jit_load

    def load(self: Any, verbose: bool = True) -> Any:
        if not allowed:
            raise RunFailedError(
                f"DeepSpeed would compile its operator {self.name} now, which takes minutes; type "
                "strategy.build_operators=true to have it built, or use a torch optimizer and no nvme."
            )
        say(f"DeepSpeed compiles its operator {self.name}; this takes minutes the first time.")
        return jit_load(self, verbose)

    communication.build_shm_op = lambda: None
    builder.jit_load = load
    try:
        yield
    finally:
        communication.build_shm_op = build_shm_op
        builder.jit_load = jit_load


def forget_earlier_runs() -> None:
    """Forget what DeepSpeed keeps in globals of the process: groups of an earlier world, numbers of its parameters and
    modules (these in the default of an argument).

    The numbers must be the same on all ranks, and a process that serves several runs in turn may have seen other ones.
    """
    importlib.import_module("deepspeed.utils.groups")._release_process_group_references()
    communication: Any = importlib.import_module("deepspeed.comm.comm")
    communication.cdb = None
    autocast: Any = importlib.import_module("deepspeed.runtime.torch_autocast")
    autocast.TORCH_AUTOCAST_INITIALIZED, autocast.TORCH_AUTOCAST_DTYPE = False, None
    init: Any = importlib.import_module("deepspeed.runtime.zero.partition_parameters").Init
    init.param_id = init.num_persisted_parameters = init.num_persisted_elements = 0
    offload: Any = importlib.import_module("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload
    offload._register_deepspeed_module.__defaults__[0][0] = 0


def partition(init: Any, parameter: nn.Parameter) -> None:
    """Keep only this rank's shard of a parameter that has its values; `init` is a `deepspeed.zero.Init`.

    The public way is to build the module inside `init`, which draws weights that depend on the number of ranks.
    """
    init._convert_to_zero_parameters([parameter])


def set_loss_scale(optimizer: Any, scale: float) -> None:
    """Set what the gradients of a ZeRO optimizer are divided by in its next step, after their norm was taken.

    The public `override_loss_scale` does these two lines and logs every change.
    """
    optimizer.custom_loss_scaler = True
    optimizer.external_loss_scale = scale


@contextmanager
def discarding(optimizer: Any) -> Generator[None, None, None]:
    """A step of a ZeRO optimizer inside finds an overflow: it frees all gradients and changes nothing."""
    before = vars(optimizer).get("check_grad_overflow"), optimizer.dtype

    def overflow(partition_gradients: bool = True) -> None:
        optimizer.overflow = True

    optimizer.check_grad_overflow = True
    optimizer.dtype = torch.float16  # stage 3 looks for an overflow in this format only
    optimizer.check_overflow = overflow
    try:
        yield
    finally:
        del optimizer.check_overflow
        optimizer.check_grad_overflow, optimizer.dtype = before


def flat_groups(optimizer: Any) -> list[tuple[Tensor, Sequence[nn.Parameter]]]:
    """Return for each flat master tensor of this rank, which the torch optimizer updates, the parameters in it."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        return list(zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True))
    return list(zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True))


def link_states(optimizer: Any) -> None:
    """Have the parameters of stages 1 and 2 find the optimizer's states, as after a first step."""
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def publish_masters(optimizer: Any) -> None:
    """Copy changed master weights into the weights that the model computes with; collective."""
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer.update_lp_params()
        return
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def gradient_pieces(optimizer: Any) -> Iterator[Tensor]:
    """Yield what a rank holds of reduced gradients between two backwards, or between the last one and the step."""
    for flat, _ in flat_groups(optimizer):
        if flat.grad is not None:
            yield flat.grad
    for held in (optimizer.averaged_gradients, getattr(optimizer, "all_grad_tensors", {})):
        for pieces in held.values():
            yield from pieces or ()

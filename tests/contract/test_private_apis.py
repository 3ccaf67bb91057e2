"""Private names of torch, Lightning and DeepSpeed are used in four files only; this notices when one of them moves."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ADAPTERS = (
    ROOT / "framework" / "adapters" / "torch_private.py",
    ROOT / "framework" / "adapters" / "torch_memory.py",
    ROOT / "framework" / "adapters" / "lightning_private.py",
    ROOT / "framework" / "adapters" / "lightning_averaging.py",
    ROOT / "framework" / "adapters" / "deepspeed_private.py",
)
FOREIGN = ("torch", "lightning", "deepspeed", "hydra", "pluggy", "omegaconf", "rich")
"""Packages whose private names are meant."""


EXCEPTIONS = {
    "hydra._internal.utils.get_args_parser": "the front end extends Hydra's own command line",
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper": "one way of splitting `a=1,2` into jobs, Hydra's",
}
"""Private names that stay where they are used, because Hydra is pinned to one minor version; with the reason."""


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def foreign_imports(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Yield (module, name or "", line) of each import from the foreign packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.partition(".")[0] in FOREIGN:
                yield from ((node.module, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "", node.lineno) for a in node.names if a.name.partition(".")[0] in FOREIGN)


def uses(file: Path) -> Iterator[str]:
    """Yield each private import and each private attribute of an imported foreign module or class."""
    tree = ast.parse(file.read_text())
    known = set()
    for module, name, line in foreign_imports(tree):
        known.add(name or module.partition(".")[0])
        if is_private(f"{module}.{name}"):
            yield f"{file.relative_to(ROOT)}:{line}: {module}.{name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in known:
                yield f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def sources() -> list[Path]:
    return [*(ROOT / "framework").rglob("*.py"), *(ROOT / "plugins").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]


def test_private_names_only_in_the_adapters() -> None:
    found = [use for file in sources() if file not in ADAPTERS for use in uses(file)]
    found = [use for use in found if use.rpartition(" ")[2] not in EXCEPTIONS]
    assert not found, "move these to framework/adapters/:\n" + "\n".join(found)


def test_a_use_elsewhere_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_private_apis.ROOT", tmp_path)
    file = tmp_path / "bad.py"
    file.write_text(
        "import torch\nfrom torch.distributed import _tensor\nfrom lightning import Trainer\ntorch._C._x()\n"
    )
    assert len(list(uses(file))) == 3


PRIVATE = sorted({
    (module, name)
    for file in ADAPTERS
    for module, name, _ in foreign_imports(ast.parse(file.read_text()))
    if name and is_private(f"{module}.{name}")
} | {(full.rpartition(".")[0], full.rpartition(".")[2]) for full in EXCEPTIONS})  # fmt: skip


@pytest.mark.parametrize(("module", "name"), PRIVATE, ids=[f"{module}.{name}" for module, name in PRIVATE])
def test_it_is_still_there(module: str, name: str) -> None:
    found = importlib.import_module(module)
    if not hasattr(found, name):
        importlib.import_module(f"{module}.{name}")


def test_attributes_that_the_adapters_reach_for() -> None:
    """What isn't imported by name but reached through an object; each with what it is needed for."""
    import torch
    from torch import nn
    from torch.distributed import distributed_c10d
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import _redistribute

    assert isinstance(nn.Linear(1, 1)._parameters, dict)
    assert not nn.Linear(1, 1)._forward_hooks
    assert not nn.Linear(1, 1)._forward_pre_hooks
    assert hasattr(distributed_c10d, "default_pg_timeout"), "new_group reads it: the one time limit of all groups"
    assert hasattr(distributed_c10d._world, "pg_map"), "list of all groups, for the check of their time limits"
    assert torch._C._current_graph_task_id() == -1
    assert callable(DeviceMesh._flatten)
    assert callable(_redistribute._gen_transform_infos.cache_clear)
    assert callable(_redistribute.clear_redistribute_planner_cache)
    assert torch.utils.data._utils.worker._worker_info is None, "get_worker_info reads it: streams are read whole"
    leaf = torch.ones(1, requires_grad=True)
    assert [type(node).__name__ for node, _ in (leaf * 2).grad_fn.next_functions if node] == ["AccumulateGrad"]  # type: ignore[union-attr]


def test_a_table_of_actions_is_lowered_by_torch() -> None:
    """`pp=csv` hands its table to a private runtime, which adds what is sent."""
    from types import SimpleNamespace

    from framework.adapters.torch_private import schedule_of_actions

    stage: Any = SimpleNamespace(num_stages=2, group_size=2, group_rank=0, stage_index=0)
    rows = [["0F0", "0F1", "", "0B0", "0I1", "0W1"], ["1F0", "1B0", "1F1", "1B1"]]
    made = schedule_of_actions(rows, [stage], 2, lambda *_: None)
    lowered = {rank: [str(action) for action in row] for rank, row in made.pipeline_order_with_comms.items()}
    computed = [action for action in lowered[0] if action[1:2] in "FBIW" and "_" not in action]
    assert computed == ["0F0", "0F1", "0B0", "0I1", "0W1"]
    assert [action for action in lowered[0] if "_F" in action or "_B" in action] == [
        "0SEND_F0", "0SEND_F1", "0RECV_B0", "0RECV_B1",
    ]  # fmt: skip
    assert made.stage_index_to_group_rank == {0: 0, 1: 1}
    assert made.scale_grads is False


def test_calls_of_a_module_can_be_taken_over() -> None:
    """`around_calls` uses the attribute that `Module.compile` sets; hooks stay inside of the call."""
    from torch import nn, ones

    from framework.adapters.torch_private import around_calls

    layer, seen = nn.Linear(2, 2), []
    layer.register_forward_hook(lambda *_: seen.append("hook"))

    def call(run: object, *args: object) -> object:
        seen.append("call")
        return run(*args)  # type: ignore[operator]

    around_calls(layer, call)
    layer(ones(1, 2))
    assert seen == ["call", "hook"]


def test_loaders_are_found_before_a_run_sets_its_data_up() -> None:
    """`loader_source`, `moved` and `count_batches` reach for these."""
    from lightning.pytorch import LightningModule, Trainer

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert callable(trainer.fit_loop._data_source.dataloader)
    assert hasattr(type(trainer), "_evaluation_loop")
    assert callable(LightningModule._apply_batch_transfer_handler)
    manual = trainer.fit_loop.epoch_loop.manual_optimization
    assert callable(manual._on_after_step)
    assert callable(manual._on_before_step)
    assert hasattr(manual.optim_step_progress, "increment_completed")


def test_a_selectively_checkpointed_region_hands_out_its_outputs_again() -> None:
    """`RepeatableReplay` reaches for `storage` of the second context; without it torch refuses a second time."""
    import torch
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    from framework.adapters.torch_private import RepeatableReplay

    def twice(repeatable: bool) -> list[torch.Tensor]:
        def contexts() -> tuple[object, object]:
            forward, replay = create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
            return forward, RepeatableReplay(replay) if repeatable else replay

        weight, x = torch.eye(3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
        y = checkpoint(lambda x: torch.sigmoid(x @ weight).exp(), x, use_reentrant=False, context_fn=contexts).sum()
        return [*torch.autograd.grad(y, x, retain_graph=True), *torch.autograd.grad(y, weight)]

    assert all(torch.isfinite(gradient).all() for gradient in twice(True))
    with pytest.raises(RuntimeError, match="backward an extra time"):
        twice(False)


def test_units_of_fsdp_can_be_watched() -> None:
    """`watch_unit` wraps two methods of FSDP2's parameter group, and reads which of its parameters have a gradient."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from framework.adapters.torch_private import watch_unit

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2, bias=False)
        model.other = nn.Linear(2, 2, bias=False)
        fully_shard(model)
        seen: list[object] = []
        watch_unit(model, lambda: seen.append("forward"), seen.append)
        model(torch.ones(1, 2)).sum().backward()
        assert seen[0] == "forward"
        (held,) = seen[1:]
        assert {(one.owner, one.key, one.parameter, one.has_gradient) for one in held} == {  # type: ignore[attr-defined]
            (model, "weight", model.weight, True),
            (model.other, "weight", model.other.weight, False),
        }
    finally:
        dist.destroy_process_group()


def test_parameters_can_be_swapped_for_any_tensor() -> None:
    import torch
    from torch import nn

    from framework.adapters.torch_private import swapped_parameters

    layer = nn.Linear(2, 2, bias=False)
    before, x = layer.weight, torch.ones(1, 2)
    with swapped_parameters(layer, {"weight": torch.full((2, 2), 3.0)}):
        assert layer(x).tolist() == [[6.0, 6.0]]
    assert layer.weight is before
    with pytest.raises(ZeroDivisionError), swapped_parameters(layer, {"weight": torch.zeros(2, 2)}):
        raise ZeroDivisionError
    assert layer.weight is before


def test_in_place_operations_are_seen_through_views_and_torch_init() -> None:
    """What `framework.initialize` records by: dispatch mode, storage identity, torch.nn.init's truncated normal."""
    import torch
    from torch import nn

    from framework.adapters.torch_private import in_place_operations, storage_id

    weight = nn.Parameter(torch.empty(4, 3, device="meta"))
    other = torch.empty(4, 3, device="meta")
    assert storage_id(weight) == storage_id(weight.data) == storage_id(weight[1]) != storage_id(other)
    seen: list[str] = []

    def see(name: str, target: torch.Tensor, *_: object) -> None:
        if storage_id(target) == storage_id(weight):
            seen.append(name)

    def see_trunc_normal(target: torch.Tensor, mean: float, std: float, a: float, b: float) -> bool:
        seen.append(f"trunc {mean} {std} {a} {b}")
        return True

    original = nn.init._no_grad_trunc_normal_
    with torch.no_grad(), in_place_operations(see, see_trunc_normal):
        for call in (nn.init.normal_, nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.ones_):
            call(weight)
        weight.data[1].fill_(2.0)
        nn.init.trunc_normal_(weight, std=0.5, a=-1.0, b=1.0)
        assert nn.init.orthogonal_(weight) is weight
    assert seen[:6] == ["normal_", "uniform_", "normal_", "fill_", "fill_", "trunc 0.0 0.5 -1.0 1.0"]
    assert len(seen) > 6, "orthogonal_ returns at once on the meta device if it can tell"
    assert nn.init._no_grad_trunc_normal_ is original


def test_the_progress_of_lightnings_loops() -> None:
    """Loaders read and move it to resume in the middle of an epoch (P13)."""
    from lightning.pytorch import LightningModule, Trainer

    from framework.adapters import lightning_private

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy._lightning_module = LightningModule()
    assert lightning_private.finished_epochs(trainer) == 0
    assert lightning_private.completed_steps(trainer) == 0
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for field, value in (("ready", 13), ("started", 13), ("processed", 13), ("completed", 12)):
        setattr(progress.current, field, value)
        setattr(progress.total, field, value + 20)
    lightning_private.move_to_batch(trainer, saved=13, now=5, length=5)
    assert (progress.current.ready, progress.current.processed, progress.current.completed) == (5, 5, 4)
    assert (progress.total.ready, progress.total.completed) == (25, 24)
    assert lightning_private.at_last_batch(trainer)
    lightning_private.move_to_batch(trainer, saved=4, now=4, length=9)  # saved after one batch of the next window
    assert (progress.current.ready, progress.current.completed) == (4, 4)
    assert not lightning_private.at_last_batch(trainer)


def test_lightnings_signal_handlers_can_be_kept_out() -> None:
    """Its SIGTERM handler enters a broadcast on the signalled rank alone: `preemption` needs the signal for itself."""
    import inspect
    import signal

    from lightning.pytorch import LightningModule, Trainer

    from framework.adapters import lightning_private

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert hasattr(trainer._signal_connector, "register_signal_handlers")
    assert hasattr(trainer._signal_connector, "teardown")
    assert list(inspect.signature(trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor).parameters) == []
    before = signal.getsignal(signal.SIGTERM)
    lightning_private.leave_signals_alone(trainer)
    seen = []

    class Module(LightningModule):
        def test_step(self, batch: object, batch_idx: int) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))

    trainer.test(Module(), [1], verbose=False)
    assert seen == [before]
    assert trainer.received_sigterm is False


def test_the_default_time_limit_of_groups_is_read_when_they_are_made() -> None:
    from datetime import timedelta

    import torch.distributed as dist

    from framework.adapters import torch_private

    before = dist.distributed_c10d.default_pg_timeout
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        torch_private.set_default_timeout(timedelta(seconds=9))
        dist.new_group([0], group_desc="later")
        limits = {name.split()[0]: limit.total_seconds() for name, limit in torch_private.group_timeouts().items()}
    finally:
        dist.destroy_process_group()
        torch_private.set_default_timeout(before)
    assert limits == {"default_pg": 7.0, "later": 9.0}


def test_views_are_known() -> None:
    import torch

    from framework.adapters.torch_private import is_view

    tensor = torch.ones(2, 2, requires_grad=True) * 2
    assert is_view(tensor.view(4))
    assert not is_view(tensor)
    assert not is_view(tensor.clone())


def test_caches_that_hold_meshes_of_an_earlier_world_can_be_cleared() -> None:
    """Where one process serves several process groups in turn; that it helps is seen in test_ranks."""
    from torch.distributed.tensor import _redistribute

    from framework.adapters.torch_private import forget_meshes

    _redistribute._planner_cache[None] = None  # type: ignore[index,assignment]
    forget_meshes()
    assert not _redistribute._planner_cache
    assert _redistribute._gen_transform_infos.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("moment", "epochs", "batches", "stepped"),
    [
        ("the last batch", (2, 2, 1, 1), (6, 6, 6, 5), 11),
        ("the end of the epoch", (2, 2, 2, 1), (6, 6, 6, 6), 12),
        ("the start of the next epoch", (3, 2, 2, 2), (6, 6, 6, 6), 12),
        ("the end of training", (2, 2, 2, 2), (6, 6, 6, 6), 12),
    ],
)
@pytest.mark.parametrize("max_steps", [-1, 100])
def test_a_restored_loop_begins_the_next_epoch(
    moment: str, epochs: Any, batches: Any, stepped: int, max_steps: int
) -> None:
    """Whichever callback saved after the last batch of epoch 2 (6 batches, 12 in all)."""
    loop = _restored_loop(epochs, batches, stepped, max_steps, last=True)
    for progress in (loop.epoch_progress.total, loop.epoch_progress.current):
        assert (progress.ready, progress.started, progress.processed, progress.completed) == (2, 2, 2, 2), moment
    assert not loop.restarting
    assert not loop.epoch_loop.restarting
    assert loop.epoch_loop._batches_that_stepped == 12


def test_a_loop_whose_training_ended_within_an_epoch_goes_on_there() -> None:
    loop = _restored_loop((2, 2, 2, 2), (4, 4, 4, 4), 10, 100, last=False)
    total, batches = loop.epoch_progress.total, loop.epoch_loop.batch_progress.current
    assert (total.ready, total.started, total.processed, total.completed) == (2, 2, 1, 1)
    assert (batches.ready, batches.processed, batches.completed) == (4, 4, 3)
    assert loop.restarting
    assert loop.epoch_loop._batches_that_stepped == 9


def _restored_loop(epochs: Any, batches: Any, stepped: int, max_steps: int, last: bool) -> Any:
    from lightning.pytorch import Trainer

    from framework.adapters import lightning_private

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_steps=max_steps, max_epochs=9, **quiet)
    loop = trainer.fit_loop
    names = ("ready", "started", "processed", "completed")
    for progress, values, earlier in (
        (loop.epoch_progress, epochs, 0), (loop.epoch_loop.batch_progress, batches, 6),
    ):  # fmt: skip
        for name, value in zip(names, values, strict=True):
            setattr(progress.current, name, value)
            setattr(progress.total, name, value + earlier)
    loop.epoch_loop.batch_progress.is_last_batch = last
    loop.epoch_loop._batches_that_stepped = stepped
    state = loop.state_dict()
    again = Trainer(max_steps=max_steps, max_epochs=9, **quiet)
    lightning_private.resume_cleanly(again)
    again.fit_loop.load_state_dict(state)
    assert "load_state_dict" not in vars(again.fit_loop)  # once only
    return again.fit_loop


def test_what_the_adapter_reaches_for_in_deepspeed() -> None:
    """Names on objects that need several processes; that each does what is said of it is seen in the parity rows."""
    import inspect

    from deepspeed.ops.op_builder import builder
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.zero import partition_parameters, stage3, stage_1_and_2
    from deepspeed.utils import groups

    comm, communication = (importlib.import_module(f"deepspeed.comm.{name}") for name in ("comm", "torch"))
    assert "build_shm_op" in communication.TorchBackend.__init__.__code__.co_names
    assert hasattr(comm, "cdb")
    assert hasattr(torch_autocast, "TORCH_AUTOCAST_INITIALIZED")
    assert hasattr(torch_autocast, "TORCH_AUTOCAST_DTYPE")
    assert callable(groups._release_process_group_references)
    assert list(inspect.signature(builder.OpBuilder.jit_load).parameters) == ["self", "verbose"]
    init = partition_parameters.Init
    assert callable(init._convert_to_zero_parameters)
    assert {"param_id", "num_persisted_parameters", "num_persisted_elements"} <= set(vars(init))
    offload = importlib.import_module("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload
    assert [type(one) for (one,) in offload._register_deepspeed_module.__defaults__] == [int]
    for zero in (stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3):
        scale = inspect.getsource(zero.override_loss_scale)
        assert "self.custom_loss_scaler = True" in scale
        assert "self.external_loss_scale = loss_scale" in scale
        assert callable(zero.check_overflow)
        assert "averaged_gradients" in inspect.getsource(zero)
    first, third = stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3
    assert {"update_lp_params", "_lazy_init_hp_params_optimizer_state"} <= set(dir(first))
    assert "_reassign_or_swap_out_partitioned_parameters" in dir(third)
    source = inspect.getsource(first)
    for name in ("_hp_optimizer_states_linked", "single_partition_of_fp32_groups", "bit16_groups", "all_grad_tensors"):
        assert f"self.{name}" in source
    source = inspect.getsource(third)
    for name in ("fp32_partitioned_groups_flat", "fp16_groups", "persistent_parameters"):
        assert f"self.{name}" in source


@pytest.mark.parametrize("allowed", [False, True])
def test_deepspeed_compiles_nothing_without_a_word(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder, builder

    from framework.adapters.deepspeed_private import building
    from framework.errors import RunFailedError

    communication = importlib.import_module("deepspeed.comm.torch")  # the attribute of this name is torch itself
    built: list[str] = []
    monkeypatch.setattr(builder.OpBuilder, "jit_load", lambda self, verbose=True: built.append(self.name))
    said: list[str] = []
    with building(allowed, said.append):
        assert communication.build_shm_op() is None
        if allowed:
            AsyncIOBuilder().jit_load()
        else:
            with pytest.raises(RunFailedError, match="would compile its operator async_io now"):
                AsyncIOBuilder().jit_load()
    assert built == (["async_io"] if allowed else [])
    assert [line for line in said if "compiles its operator async_io" in line] == said
    assert len(said) == len(built)
    AsyncIOBuilder().jit_load()
    assert len(said) == int(allowed), "outside it is DeepSpeed's own again"

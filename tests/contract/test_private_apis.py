"""Private names of torch and Lightning are used in two files only, and this notices when one of them moves."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTERS = (
    ROOT / "framework" / "adapters" / "torch_private.py",
    ROOT / "framework" / "adapters" / "lightning_private.py",
)
FOREIGN = ("torch", "lightning", "hydra", "pluggy", "omegaconf", "rich")
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
    from torch.distributed.tensor import _redistribute

    assert isinstance(nn.Linear(1, 1)._parameters, dict)
    assert not nn.Linear(1, 1)._forward_hooks
    assert not nn.Linear(1, 1)._forward_pre_hooks
    assert hasattr(distributed_c10d, "default_pg_timeout"), "new_group reads it: the one time limit of all groups"
    assert hasattr(distributed_c10d._world, "pg_map"), "list of all groups, for the check of their time limits"
    assert callable(_redistribute._gen_transform_infos.cache_clear)
    assert callable(_redistribute.clear_redistribute_planner_cache)
    leaf = torch.ones(1, requires_grad=True)
    assert [type(node).__name__ for node, _ in (leaf * 2).grad_fn.next_functions if node] == ["AccumulateGrad"]  # type: ignore[union-attr]


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

"""`compile=block`: torch.compile on each repeated block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework import Problem, RunPlan, hookimpl

if TYPE_CHECKING:
    from framework.parts import ModelPart


@dataclass(kw_only=True, eq=False)
class CompiledBlocks:
    """Regional compilation (`torch.nn.Module.compile`) of the model's repeated blocks.

    Blocks of one class share one compilation, so that the first step takes as long as one block, whatever the depth is.
    What surrounds a block (communication of a data-parallel wrap, a pipeline's stages) isn't traced.

    Attributes:
        backend: one of `torch.compiler.list_backends()`, or `aot_eager` or `eager`, which trace and make no kernels.
        mode: of inductor; None = its default.
        fullgraph: raise where a block can't be traced in one piece.
        dynamic: compile for any length at once; None = after the first change of a length.
    """

    backend: str = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        if self.mode is not None and self.backend != "inductor":
            raise ValueError(
                f"compile.mode={self.mode} is a setting of inductor, and compile.backend={self.backend} has no modes."
            )

    @hookimpl
    def check_model(self, plan: RunPlan, model: object) -> Sequence[Problem]:
        """A backend that torch doesn't have; a model without repeated blocks, of which nothing would be compiled."""
        import torch
        from torch import nn

        from framework.parts import find_blocks

        problems = []
        known = torch.compiler.list_backends(exclude_tags=())
        if self.backend not in known:
            problems.append(
                Problem(f"compile.backend={self.backend}", f"torch has {', '.join(known)}", "compile.backend=inductor")
            )
        if isinstance(model, nn.Module) and not find_blocks(model):
            reason = f"{type(model).__name__} has no list of two or more blocks of one class, so nothing is compiled."
            problems.append(
                Problem("compile=block", reason, "compile=none, or keep the model's layers in a ModuleList")
            )
        return problems

    @hookimpl
    def apply_compile(self, part: ModelPart, plan: RunPlan) -> None:
        """Compile the part's blocks in place; they are traced at their first call."""
        from framework.adapters.torch_private import keep_saved_buffers

        if plan.mesh.pp > 1:
            keep_saved_buffers()  # zero-bubble schedules go through the graph of a block twice
        # None would overwrite what inductor takes as given
        options: dict[str, Any] = {} if self.mode is None else {"mode": self.mode}
        for block in part.blocks.values():
            block.compile(backend=self.backend, fullgraph=self.fullgraph, dynamic=self.dynamic, **options)

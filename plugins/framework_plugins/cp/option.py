"""What the options of the concern share: settings, complaints, and where they act."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from framework import Problem, Requirements, RunPlan, hookimpl

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework.parts import ModelPart
    from framework_plugins.cp.attention import Attend, SplitAttention
    from framework_plugins.cp.sequences import Pieces

BALANCES = ("head_tail", "none")
POSITIONS = "positions"
"""Entry of a batch with the place of each token in its sequence; put in where the data has none."""

HINT = '{"inputs": 1, "targets": 1, "positions": 1}'


@dataclass(kw_only=True, eq=False)
class ContextParallel:
    """Sequences cut over the ranks of axis cp; attention exchanges what the pieces need of one another.

    Attributes:
        size: ranks that share each sequence; null = 2, or what `devices` leaves.
        seq_dims: batch entry -> dim of its sequence, null = whole on each rank; null = the model's attribute `cp_plan`.
    """

    option: ClassVar[str]
    variants: ClassVar[tuple[str, ...]] = ()

    size: int | None = None
    seq_dims: dict[str, int | None] | None = None

    def __post_init__(self) -> None:
        self._mode: SplitAttention | None = None
        if self.size is not None and self.size < 1:
            raise ValueError(f"cp.size={self.size} must be at least 1.")

    def balanced(self) -> bool:
        """Whether each rank has a piece of the front and one of the end of a sequence."""
        return False

    def attend(self, pieces: Pieces, mesh: Mesh) -> Attend:
        """Return the attention of this option."""
        raise NotImplementedError

    @hookimpl
    def mesh_axes(self) -> Mapping[str, int | None]:
        """Axis cp."""
        return {"cp": self.size}

    @hookimpl
    def requirements(self) -> Requirements:
        """Refuses what isn't proven together with it."""
        return Requirements(
            gives=frozenset({"context_parallel"}),
            excludes=frozenset({"compile", "ep"}),
            why={
                "compile": "attention is replaced while the model runs, which a compiled block may not see",
                "ep": "tokens of one sequence would meet experts of other ranks' pieces, which nothing here has proven",
            },
            variants=self.variants,
        )

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Sequences of the data that don't cut evenly, where their length is known; attention that needs a mask."""
        if plan.mesh.cp == 1:
            return []
        count, data = self.count(plan.mesh.cp), plan.components.get("data") or {}
        if data.get("attention") == "document":
            reason = "keeping attention to documents needs a mask, and ranks that share a sequence have none here"
            return [Problem(f"cp={self.option}", reason, "data.attention=window")]
        length = data.get("context")
        if not isinstance(length, int) or length % count == 0:
            return []
        reason = f"sequences of {length} tokens can't be cut into {count} equal pieces"
        below = length // count * count
        fix = f"data.context={below} or {below + count}" if below else f"data.context={count}"
        return [Problem(f"cp.size={plan.mesh.cp}", reason, fix)]

    def count(self, ranks: int) -> int:
        """Return into how many pieces sequences are cut."""
        return 2 * ranks if self.balanced() else ranks

    @hookimpl
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """A module that doesn't say what its sequences are, or mixes tokens in a way that nothing here replaces."""
        if plan.mesh.cp == 1:
            return []
        from torch import nn

        words = f"cp={self.option}"
        name = type(model).__name__
        dims = self.dims(model)
        problems = []
        if dims is None:
            reason = (
                f"{name} has no attribute `cp_plan` that says which entries of a batch are sequences, along which dim"
            )
            problems.append(Problem(words, reason, f"cp_plan = {HINT} into the class, or cp=none"))
        elif dims.get(POSITIONS) is None:
            reason = (
                f"the plan {dict(dims)} has no `{POSITIONS}`: a rank's piece doesn't start at 0, so {name} must take "
                f'the place of each token from batch["{POSITIONS}"] [samples, length]'
            )
            problems.append(Problem(words, reason, f'"{POSITIONS}": 1 into cp_plan, once it does'))
        if not model.automatic_optimization:
            reason = f"{name} optimizes by itself, and nobody would weigh the losses of the pieces"
            problems.append(Problem(words, reason, "cp=none"))
        mixers = (nn.RNNBase, nn.Conv1d, nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoderLayer)
        for path, module in model.named_modules():
            if isinstance(module, mixers):
                reason = (
                    f"layer {path} is a {type(module).__name__}, which looks at other tokens by itself; only "
                    "torch.nn.functional.scaled_dot_product_attention is replaced"
                )
                problems.append(Problem(words, reason, "cp=none"))
                break
        return problems

    def dims(self, model: Any) -> Mapping[str, int | None] | None:
        """Return batch entry -> dim of its sequence; None if nobody says so."""
        return self.seq_dims if self.seq_dims is not None else getattr(model, "cp_plan", None)

    @hookimpl
    def apply_context_parallel(self, part: ModelPart, mesh: Mesh, plan: RunPlan) -> None:
        """Cut each batch and replace attention around each step (once a rank, however many parts), and in blocks."""
        if mesh.size("cp") == 1:
            return
        if part.first:
            from framework_plugins.cp.attention import SplitAttention
            from framework_plugins.cp.sequences import BatchCut, Pieces

            dims = self.dims(part.root)
            assert dims is not None, "check_model refuses"
            pieces = Pieces(mesh.rank("cp"), mesh.size("cp"), self.balanced())
            cut = BatchCut(pieces, dims, self.option, part.masks)
            part.cuts.append(cut)
            mode = SplitAttention(self.attend(pieces, mesh), cut, whole=part.stages == 1)
            part.contexts.append(lambda: mode)
            self._mode = mode
        assert self._mode is not None
        for block in part.blocks.values():
            self._mode.watch_(block)

    @hookimpl
    def apply_data_parallel(self, part: ModelPart, mesh: Mesh, plan: RunPlan) -> None:
        """Average gradients over cp where no strategy is chosen that does it together with its own axes."""
        if mesh.size("cp") == 1 or plan.chosen("strategy") is not None:
            return
        from framework.reduction import GradientReduction

        part.reduction = GradientReduction.of_part(part, plan, mesh.group("cp"))


@dataclass(kw_only=True, eq=False)
class BalancedContextParallel(ContextParallel):
    """Options whose ranks may have equal work under a causal mask.

    Attributes:
        balance: `head_tail`: rank r has pieces r and 2 x size - 1 - r of each sequence, so that all have equal work
            under a causal mask; `none`: piece r of `size`, and the last rank works twice as long as the mean.
    """

    variants: ClassVar[tuple[str, ...]] = ("balance=none",)

    balance: str = "head_tail"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.balance not in BALANCES:
            raise ValueError(f"cp.balance={self.balance} is unknown; choose {' or '.join(BALANCES)}.")

    def balanced(self) -> bool:
        """As `balance` says."""
        return self.balance == "head_tail"

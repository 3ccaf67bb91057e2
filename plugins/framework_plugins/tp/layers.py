"""What the options of the concern `tp` share: settings, plan, checks and the surgery; they differ in communication."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from framework import Problem, Requirements, RunPlan, hookimpl
from framework_plugins.tp.layout import SPLIT_WORDS, resolve

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework.parts import ModelPart
    from framework_plugins.tp.styles import Axis
    from framework_plugins.tp.tracing import Found

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class LayerParallel:
    """Tensor parallelism (Shoeybi et al., 2019) with sequence and loss parallelism as switches.

    Attributes:
        size: ranks that share each layer; None = as many as `devices` leaves.
        plan: pattern -> word (`framework_plugins.tp.layout.WORDS`), names relative to the LightningModule, `*` for one
            part of a name; None = the model's own attribute `tp_plan`, and without that what tracing finds.
        sequence_parallel: between blocks each rank holds a piece of every sequence (Korthikanti et al., 2022).
        loss_parallel: logits stay split over the vocabulary, and the loss is computed on the pieces.
        check_shapes: in each backward, hold the gradient of every layer in the plan against the shape of its piece.
    """

    option: ClassVar[str]

    size: int | None = None
    plan: dict[str, str] | None = None
    sequence_parallel: bool = False
    loss_parallel: bool = False
    check_shapes: bool = False

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"tp.size={self.size} must be at least 1.")
        self._found: Found | None = None  # no field: it is no setting

    def axis(self) -> type[Axis]:
        """Return what moves activations between the ranks."""
        raise NotImplementedError

    def words(self, model: Any) -> Mapping[str, str]:
        """Return the plan of `model`: pattern -> word; empty = nothing can be split."""
        told = self._told(model)
        return told if told is not None else self._traced(model).words

    def _told(self, model: Any) -> Mapping[str, str] | None:
        return self.plan if self.plan is not None else getattr(model, "tp_plan", None)

    def _traced(self, model: Any) -> Found:
        """Return what tracing finds; of the whole model, which `check_model` gets before it is cut into stages."""
        if self._found is None:
            from framework_plugins.tp.tracing import find

            self._found = find(model)
        return self._found

    @hookimpl
    def mesh_axes(self) -> Mapping[str, int | None]:
        """Axis tp."""
        return {"tp": self.size}

    @hookimpl
    def requirements(self) -> Requirements:
        """Nothing; both switches change what is communicated."""
        both = "sequence_parallel=true loss_parallel=true"
        return Requirements(variants=(*both.split(), both))

    @hookimpl
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """Every layer that can't be split, by name."""
        if plan.mesh.tp == 1:
            return []
        from framework_plugins.tp.checks import of_tracing, problems

        self._found = None  # of another model
        found = self._traced(model) if self._told(model) is None else None
        refused = of_tracing(model, found, self.option, self.sequence_parallel) if found is not None else []
        if refused:
            return refused
        if found is not None:
            log.info(
                "tp=%s: plan found by tracing: %s; left whole: %s", self.option, found.words, found.whole or "none"
            )
        return problems(
            model,
            self.words(model),
            plan.mesh.tp,
            option=self.option,
            sequence_parallel=self.sequence_parallel,
            loss_parallel=self.loss_parallel,
        )

    @hookimpl
    def split_dims(self, plan: RunPlan, model: Any) -> Mapping[str, int]:
        """`colwise` and `head` layers and embeddings are cut along dim 0, weights of `rowwise` layers along dim 1."""
        if plan.mesh.tp == 1:
            return {}
        modules = dict(model.named_modules())
        layout = resolve(self.words(model), modules)
        return {
            parameter: 1 if layout.words[name] == "rowwise" else 0
            for name in layout.named(*SPLIT_WORDS)
            for parameter, tensor in modules[name].named_parameters(name)
            if layout.words[name] != "rowwise" or tensor.ndim > 1  # a `rowwise` layer's bias stays whole
        }

    @hookimpl
    def apply_tensor_parallel(self, part: ModelPart, mesh: Mesh) -> None:
        """Split the layers of one stage; on the meta device too. Collective over tp if the weights are real."""
        if mesh.size("tp") == 1:
            return
        from framework_plugins.tp.apply import split_
        from framework_plugins.tp.streams import Streams
        from framework_plugins.tp.vocab_loss import VocabLoss

        axis = self.axis()(
            mesh["tp"],
            Streams(mesh.rank("tp"), mesh.device_type, mesh.size("tp"), part.masks),
            sequence_parallel=self.sequence_parallel,
            loss_parallel=self.loss_parallel,
            check_shapes=self.check_shapes,
        )
        layout = resolve(self.words(part.root), part.owned)
        split_(part, layout, axis)
        if self._told(part.root) is None:
            from framework_plugins.tp.tracing import guard_

            guard_(part.owned, self._traced(part.root))
        if self.loss_parallel and layout.named("head"):
            part.contexts.append(VocabLoss)

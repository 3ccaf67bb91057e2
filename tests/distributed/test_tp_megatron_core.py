"""`tp=megatron` against Megatron-LM's own layers, where the package `megatron-core` is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from framework.mesh import Mesh
from framework.parts import whole
from framework.plan import MeshSpec
from framework_plugins.tp.megatron import MegatronParallel
from framework_plugins.tp.vocab_loss import VocabLoss

if find_spec("megatron") is None:
    pytest.skip("megatron-core isn't installed", allow_module_level=True)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 10, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.up(x))))


def theirs(model: Model, x: Tensor, factors: Tensor, targets: Tensor) -> dict[str, Any]:
    """The same model of Megatron-LM's layers: logits, gradients of this rank's pieces, loss a token (in float32)."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        vocab_parallel_cross_entropy,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1, hidden_size=6, num_attention_heads=2, use_cpu_initialization=True, params_dtype=torch.float64,
        gradient_accumulation_fusion=False, tensor_model_parallel_size=2,
    )  # fmt: skip
    options = {"config": config, "init_method": nn.init.zeros_}
    up = ColumnParallelLinear(6, 8, bias=True, gather_output=False, **options)
    down = RowParallelLinear(8, 6, bias=True, input_is_parallel=True, skip_bias_add=False, **options)
    head = ColumnParallelLinear(6, 10, bias=False, gather_output=False, **options)
    rank = parallel_state.get_tensor_model_parallel_rank()
    layers = {"up": up, "down": down, "head": head}
    with torch.no_grad():
        for name, layer in layers.items():
            whole_layer = getattr(model, name)
            layer.weight.copy_(whole_layer.weight.chunk(2, 1 if name == "down" else 0)[rank])
            if whole_layer.bias is not None:
                layer.bias.copy_(whole_layer.bias if name == "down" else whole_layer.bias.chunk(2)[rank])
    logits = head(down(torch.tanh(up(x)[0]))[0])[0]
    (logits * factors.chunk(2, -1)[rank]).sum().backward()
    loss = vocab_parallel_cross_entropy(logits.detach().clone(), targets)
    parallel_state.destroy_model_parallel()
    gradients = {f"{name}.{key}": p.grad for name, layer in layers.items() for key, p in layer.named_parameters()}
    return {"logits": logits.detach(), "loss": loss, "x": x.grad, **gradients}


def ours(model: Model, x: Tensor, factors: Tensor, targets: Tensor) -> dict[str, Any]:
    words = {"up": "colwise", "down": "rowwise", "head": "head"}
    made = MegatronParallel(plan=words, loss_parallel=True, check_shapes=True)
    mesh = Mesh(MeshSpec(tp=2))
    made.apply_tensor_parallel(part=whole(model), mesh=mesh)
    logits = model(x)
    (logits.to_local() * factors.chunk(2, -1)[mesh.rank("tp")]).sum().backward()
    with VocabLoss(), torch.no_grad():
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    gradients = {name: p.grad.to_local() for name, p in model.named_parameters()}
    return {"logits": logits.to_local().detach(), "loss": loss, "x": x.grad, **gradients}


def differences() -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)
    factors = torch.randn(3, 4, 10, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 10, (3, 4), generator=generator)
    want = theirs(Model(), x.clone().requires_grad_(), factors, targets)
    got = ours(Model(), x.clone().requires_grad_(), factors, targets)
    assert got.keys() == want.keys()
    return {name: float((got[name] - want[name]).abs().max()) for name in want}


def test_layers_and_loss_are_those_of_megatron_core(pool) -> None:
    for found in pool.run(differences, 2, timeout=240):  # importing their package takes long
        assert len(found) == 8
        assert found.pop("loss") < 1e-6, "theirs is computed in float32"
        assert {name: error for name, error in found.items() if not error < 1e-12} == {}

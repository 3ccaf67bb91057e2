"""Initial weights: what `init_weights` does is noted on the meta device and replayed on pieces."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from framework import counter, initialize
from framework.errors import UsageError
from framework_plugins.model.gpt import GPT


def splitmix64(seed: int, count: int) -> list[int]:
    """The published algorithm, in plain integers."""
    mask, state, out = (1 << 64) - 1, seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


def test_bits_are_splitmix64() -> None:
    assert splitmix64(1234567, 1) == [0x599ED017FB08FC85], "the published test vector"
    for key in (0, 1234567, counter.derive("weights", 3, "a.b"), (1 << 64) - 1):
        mine = [value & ((1 << 64) - 1) for value in counter.bits(key, torch.arange(100)).tolist()]
        assert mine == splitmix64(key, 100)


def test_numbers_depend_on_key_and_position_only() -> None:
    key = counter.derive("k")
    whole = counter.normal(key, torch.arange(10_000))
    for start, stop in ((0, 1), (7, 4099), (9_990, 10_000)):
        assert torch.equal(counter.normal(key, torch.arange(start, stop)), whole[start:stop])
    assert not torch.equal(counter.normal(key + 1, torch.arange(10)), whole[:10])
    n = len(whole)
    assert abs(float(whole.mean())) < 4 / math.sqrt(n)
    assert abs(float(whole.std()) - 1) < 4 / math.sqrt(2 * n)
    assert sorted(counter.permutation(key, 1000).tolist()) == list(range(1000))


def build(module: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.device("meta"):
        made = module()
    initialize.materialize(made, torch.device("cpu"), seed, initialize.origin(made))
    return made


class Net(nn.Module):
    """One of each: layers of torch, in-place edits, a view, a buffer, a truncated normal, a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 40, padding_idx=3)
        self.linear = nn.Linear(40, 60)
        self.norm = nn.BatchNorm1d(60)
        self.truncated = nn.Parameter(torch.empty(3000))
        self.register_buffer("table", torch.arange(12.0).reshape(3, 4))
        self.head = nn.Linear(40, 50, bias=False)
        self.again = self.linear

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.truncated, mean=0.1, std=0.5, a=-0.6, b=0.4)
        self.table.copy_(torch.arange(12.0).reshape(3, 4))
        with torch.no_grad():
            self.linear.weight.mul_(2)
            self.linear.weight.data[2:4, 1].fill_(7)
            nn.init.xavier_normal_(self.head.weight)


def test_what_torch_would_do_is_done() -> None:
    net = build(Net)
    assert isinstance(net, Net)
    assert torch.equal(net.embedding.weight[3], torch.zeros(40))
    assert abs(float(net.embedding.weight.detach()[4:].std()) - 1) < 0.1
    weight = net.linear.weight.detach()
    assert torch.equal(weight[2:4, 1], torch.tensor([7.0, 7.0]))
    rest = torch.cat([weight[:2].flatten(), weight[4:].flatten()])
    bound = 2 / math.sqrt(40)  # kaiming_uniform_ with a = sqrt(5), doubled
    assert 0.95 * bound < float(rest.abs().max()) <= bound
    assert torch.equal(net.norm.running_var, torch.ones(60))
    assert net.norm.num_batches_tracked.dtype is torch.int64
    assert torch.equal(net.table, torch.arange(12.0).reshape(3, 4))
    assert -0.6 <= float(net.truncated.detach().min()) < -0.59 < 0.39 < float(net.truncated.detach().max()) <= 0.4
    assert abs(float(net.head.weight.detach().std()) / math.sqrt(2 / 90) - 1) < 0.1
    assert net.again is net.linear
    assert all(not tensor.is_meta for tensor in net.state_dict().values())


def test_values_follow_from_seed_and_name() -> None:
    one, same, other = (build(Net, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["linear.bias"], other["linear.bias"])

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def init_weights(self) -> None:
            pass

    twice = build(Twice)
    assert not torch.equal(twice.a.weight, twice.b.weight)  # type: ignore[union-attr, arg-type]


def test_each_draw_on_a_parameter_has_numbers_of_its_own() -> None:
    class Redrawn(nn.Module):
        def __init__(self, again: bool = True) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(3, 4))
            self.again = again

        def init_weights(self) -> None:
            with torch.no_grad():
                self.w.uniform_()
                if self.again:
                    self.w[1].uniform_()

    once, twice = build(lambda: Redrawn(again=False)).w, build(Redrawn).w
    assert isinstance(once, Tensor)
    assert isinstance(twice, Tensor)
    assert torch.equal(once[[0, 2]], twice[[0, 2]])
    assert not (once[1] == twice[1]).any()


def test_a_tied_parameter_stays_one() -> None:
    model = build(lambda: GPT(vocab_size=10, width=8, layers=2, heads=2, tied=True))
    assert isinstance(model, GPT)
    assert model.output.weight is model.tokens.weight
    names = dict(model.named_parameters())
    assert "tokens.weight" in names
    assert "output.weight" not in names
    assert names["tokens.weight"].numel() == 80


def test_retie_after_a_split_gave_each_name_its_own() -> None:
    model = GPT(vocab_size=10, width=8, layers=2, heads=2, tied=True)
    origin = initialize.origin(model)
    model.output.weight = nn.Parameter(model.tokens.weight.detach().clone())
    initialize.retie(model, origin)
    assert model.output.weight is model.tokens.weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_have_the_final_dtype(dtype: torch.dtype) -> None:
    def module() -> nn.Module:
        return GPT(vocab_size=16, width=16, layers=1, heads=2).to(dtype)

    made = build(module)
    assert {parameter.dtype for parameter in made.parameters()} == {dtype}
    single = build(lambda: GPT(vocab_size=16, width=16, layers=1, heads=2))
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter.to(torch.bfloat16), single.get_parameter(name).to(torch.bfloat16)), name


def bad(init: Callable[[nn.Linear], None]) -> type[nn.Module]:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.ones(3))

        def init_weights(self) -> None:
            init(self.linear)
            nn.init.ones_(self.scale)

    return Bad


def orthogonal(linear: nn.Linear) -> None:
    nn.init.orthogonal_(linear.weight)


def sparse(linear: nn.Linear) -> None:
    nn.init.sparse_(linear.weight, 0.5)


def from_itself(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.weight.div_(linear.weight.sum(0, keepdim=True))


@pytest.mark.parametrize(
    ("init", "words"), [(orthogonal, "weight by"), (sparse, "weight by"), (from_itself, "weight by div_")]
)
def test_what_cannot_be_replayed_is_refused_by_name(init: Callable[[nn.Linear], None], words: str) -> None:
    """Torch's own functions do nothing at all on the meta device for some of these: that would be silent."""
    with pytest.raises(UsageError, match=words):
        build(bad(init))


def test_a_forgotten_parameter_is_named() -> None:
    class Forgets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def init_weights(self) -> None:
            pass

    with pytest.raises(UsageError, match=r"Forgets.init_weights leaves scale as they are"):
        build(Forgets)


def test_a_module_with_weights_is_left_alone() -> None:
    model = nn.Linear(3, 3)
    before: Tensor = model.weight.detach().clone()
    origin = initialize.origin(model)
    initialize.materialize(model, torch.device("cpu"), 0, origin)
    assert torch.equal(model.weight, before)

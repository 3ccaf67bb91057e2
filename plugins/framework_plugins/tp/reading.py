"""Follow through a traced graph what cutting linear layers by columns would do to every value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

RANK = 3
"""Dimensions of an activation: samples, positions, width."""

LEARNED = "(a parameter)"
"""Origin of what comes from a parameter; no name of an argument."""


@dataclass(frozen=True)
class Whole:
    """A value that every rank has alike, or a number.

    Attributes:
        origins: arguments that it comes from, and `LEARNED`.
    """

    origins: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Split:
    """A value of which each rank has a piece.

    Attributes:
        sources: linear layers that must be cut by columns for that.
        dim: along which it is cut, counted from the end (-1: the outputs of the layers).
        rank: number of dimensions.
    """

    sources: frozenset[str]
    dim: int = -1
    rank: int = RANK

    def at(self, dim: int) -> int:
        """Return `dim` counted from the end."""
        return dim if dim < 0 else dim - self.rank


@dataclass(frozen=True)
class Shape:
    """The sizes of a split value."""

    of: Split


@dataclass(frozen=True)
class Size:
    """The size of a split value along the dim that is cut: not the same in one process."""

    of: Split


MODULES = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardswish,
    nn.Dropout, nn.Identity,
)  # fmt: skip
"""Modules that work element by element, without parameters."""

ELEMENTWISE = frozenset({
    "relu", "gelu", "silu", "mish", "elu", "leaky_relu", "sigmoid", "tanh", "softplus", "hardswish", "square", "pow",
    "exp", "neg", "abs", "dropout", "contiguous", "clone", "masked_fill",
})  # fmt: skip
"""Functions and methods that work element by element on their first argument."""

CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16"})
"""Methods whose other arguments say nothing but a dtype or a device."""

NUMBERS = ("shape", "dtype", "device", "ndim")
"""Attributes of a tensor that aren't tensors."""

BINARY = frozenset({"add", "sub", "mul", "truediv", "div", "iadd", "isub", "imul", "itruediv"})


class Reading:
    """What was found in one graph.

    Args:
        modules: the modules of the traced one by name.

    Attributes:
        feeds: linear layer -> the layers whose cut outputs are all that it gets.
        sides: linear layer -> arguments that meet its cut outputs.
        spoiled: linear layer that can't be cut by columns -> the operation that needs its output whole.
        counts: line -> (layers, number) where a view writes out into how many heads their outputs go.
        lines: the graph as text.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.values: dict[fx.Node, Any] = {}
        self.feeds: dict[str, frozenset[str]] = {}
        self.sides: dict[str, set[str]] = {}
        self.counts: dict[int, tuple[frozenset[str], int]] = {}
        self.lines: list[str] = []
        self._norms: dict[str, frozenset[str]] = {}
        self.spoiled: dict[str, str] = {}
        self._called: set[str] = set()

    def read(self, graph: fx.Graph) -> None:
        """Follow all values of `graph`."""
        for node in graph.nodes:
            self.lines.append(f"{node.op} {node.target} {node.args} {node.kwargs}")
            self.values[node] = self._value(node)

    def pairs(self) -> Iterator[tuple[str, frozenset[str]]]:
        """Yield (layer to cut by rows, layers to cut by columns), each layer in one role, in the order of execution."""
        eaters: dict[str, set[str]] = {}
        for row, columns in self.feeds.items():
            for column in columns:
                eaters.setdefault(column, set()).add(row)
        rows: set[str] = set()
        taken: set[str] = set()
        for row, columns in self.feeds.items():
            free = not columns & (self.spoiled.keys() | rows) and row not in taken
            if free and all(eaters[column] == {row} for column in columns):
                rows.add(row)
                taken |= columns
                yield row, columns

    def norms_between(self, columns: frozenset[str]) -> list[str]:
        """Return the normalisations of heads whose input comes from `columns`."""
        return [name for name, sources in self._norms.items() if sources & columns]

    # -- one node ------------------------------------------------------------------------------------------------------
    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return Whole(frozenset({str(node.target)}))
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            learned = isinstance(getattr(self.modules[owner], name), nn.Parameter)
            return Whole(frozenset({LEARNED} if learned else ()))
        given = [self.values[one] for one in node.all_input_nodes]
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        if node.op == "call_module":
            result = self._module(str(node.target), node, given)
        elif all(isinstance(value, Whole) for value in given):
            about = name == "size" or (name == "getattr" and node.args[1] in NUMBERS)
            result = Whole() if about else Whole(frozenset().union(*(value.origins for value in given)))
        else:
            rule = getattr(self, f"_{RULES.get(name, name)}", None) if name in RULED else None
            result = None if rule is None or node.op == "output" else rule(node)
        if result is None:
            self._spoil(given, name or str(node.target))
            return Whole(frozenset({LEARNED}))
        return result

    def _spoil(self, values: list[Any], by: str) -> None:
        """Something happens that needs these whole: their sources can't be cut."""
        for value in values:
            if not isinstance(value, Whole):
                for source in value.sources if isinstance(value, Split) else value.of.sources:
                    self.spoiled.setdefault(source, by)

    def _of(self, argument: Any) -> Any:
        return self.values[argument] if isinstance(argument, fx.Node) else None

    def _module(self, name: str, node: fx.Node, given: list[Any]) -> Any:
        module = self.modules[name]
        value = self._of(node.args[0]) if len(node.args) == 1 and not node.kwargs else None
        again = name in self._called
        self._called.add(name)
        if type(module) is nn.Linear:
            if isinstance(value, Split) and value.dim == -1 and value.rank == RANK and not again:
                self.feeds[name] = value.sources
            else:
                self._spoil(given, name)
            if again:  # one layer in two places
                self._spoil([Split(frozenset({name}) | self.feeds.pop(name, frozenset()))], name)
            return Split(frozenset({name}))
        if isinstance(value, Split) and type(module) in MODULES:
            return value
        if isinstance(value, Split) and type(module) is nn.Softmax and module.dim is not None:
            return value if value.at(module.dim) != value.dim else None
        norm = module if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and not again else None
        if norm is not None and isinstance(value, Split) and value.dim < -len(norm.normalized_shape):
            self._norms[name] = value.sources
            return value
        return None

    # -- rules: node -> value, None = not understood -------------------------------------------------------------------
    def _cast(self, node: fx.Node) -> Any:
        return self._of(node.args[0])

    def _elementwise(self, node: fx.Node) -> Any:
        first, *others = (self._of(one) for one in (*node.args, *node.kwargs.values()))
        alone = isinstance(first, Split) and all(other is None or isinstance(other, Whole) for other in others)
        return first if alone and self._beside(first, others) else None

    def _binary(self, node: fx.Node) -> Any:
        values = [self._of(one) for one in node.args[:2]]
        splits = [value for value in values if isinstance(value, Split)]
        if len(node.args) != 2 or not all(value is None or isinstance(value, (Split, Whole)) for value in values):
            return None
        if len(splits) == 2:
            return self._joined(splits)
        return splits[0] if self._beside(splits[0], values) else None

    def _beside(self, split: Split, values: list[Any]) -> bool:
        """Note what enters from outside; tell whether that is allowed.

        It may have no elements along the cut dim (of the width it might; of heads it would be noticed: shapes wouldn't
        fit), and mustn't learn (each rank would have a part of its gradient).
        """
        for value in values:
            if isinstance(value, Whole):
                if split.dim == -1 or LEARNED in value.origins:
                    return False
                for source in split.sources:
                    self.sides.setdefault(source, set()).update(value.origins)
        return True

    def _joined(self, splits: list[Any]) -> Split | None:
        """Return what values make together that are cut alike."""
        first = splits[0]
        if not all(isinstance(one, Split) and (one.dim, one.rank) == (first.dim, first.rank) for one in splits):
            return None
        return Split(frozenset().union(*(one.sources for one in splits)), first.dim, first.rank)

    def _matmul(self, node: fx.Node) -> Any:
        split = self._joined([self._of(one) for one in node.args])
        return split if split is not None and split.dim < -2 else None

    def _scaled_dot_product_attention(self, node: fx.Node) -> Any:
        names = ("query", "key", "value")
        values = [self._of(node.args[at] if at < len(node.args) else node.kwargs.get(n)) for at, n in enumerate(names)]
        split = self._joined(values)
        mask = self._of(node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask"))
        fits = split is not None and split.dim == -3 and (mask is None or isinstance(mask, Whole))
        return split if fits and split is not None and self._beside(split, [mask]) else None

    def _softmax(self, node: fx.Node) -> Any:
        value, dim = self._of(node.args[0]), _argument(node, 1, "dim")
        return value if isinstance(value, Split) and type(dim) is int and value.at(dim) != value.dim else None

    def _transpose(self, node: fx.Node) -> Any:
        value = self._of(node.args[0])
        dims = [_argument(node, 1, "dim0"), _argument(node, 2, "dim1")]
        if not isinstance(value, Split) or not all(type(dim) is int for dim in dims):
            return None
        one, other = (value.at(dim) for dim in dims)
        return replace(value, dim={one: other, other: one}.get(value.dim, value.dim))

    def _permute(self, node: fx.Node) -> Any:
        value, dims = self._of(node.args[0]), _sizes(node.args[1:])
        if not isinstance(value, Split) or len(dims) != value.rank or not all(type(dim) is int for dim in dims):
            return None
        return replace(value, dim=[value.at(dim) for dim in dims].index(value.dim) - value.rank)

    def _chunk(self, node: fx.Node) -> Any:
        value, dim = self._of(node.args[0]), _argument(node, 2, "dim")
        return value if isinstance(value, Split) and type(dim) is int and value.at(dim) != value.dim else None

    def _cat(self, node: fx.Node) -> Any:
        tensors, dim = node.args[0], _argument(node, 1, "dim")
        split = self._joined([self._of(one) for one in tensors]) if isinstance(tensors, (tuple, list)) else None
        return split if split is not None and type(dim) is int and split.at(dim) != split.dim else None

    def _repeat_interleave(self, node: fx.Node) -> Any:
        value, times = self._of(node.args[0]), _argument(node, 1, "repeats")
        known = type(times) is int and type(_argument(node, 2, "dim")) is int
        return value if isinstance(value, Split) and known and value.dim < -1 else None

    def _getitem(self, node: fx.Node) -> Any:
        value, index = self._of(node.args[0]), node.args[1]
        if isinstance(value, Shape):
            return self._size_at(value.of, index) if type(index) is int else None
        if isinstance(value, Split) and isinstance(node.args[0], fx.Node) and _makes_many(node.args[0]):
            return value if type(index) is int else None
        pair: Any = index if isinstance(index, tuple) and len(index) == 2 else (None, None)
        last_only = pair[0] is Ellipsis and isinstance(pair[1], slice)
        whole = last_only and isinstance(value, Split) and value.dim != -1
        return value if whole and not node.all_input_nodes[1:] else None

    def _getattr(self, node: fx.Node) -> Any:
        value, name = self._of(node.args[0]), node.args[1]
        if isinstance(value, Split) and name == "shape":
            return Shape(value)
        return Whole() if name in NUMBERS else None

    def _size(self, node: fx.Node) -> Any:
        value = self._of(node.args[0])
        if not isinstance(value, Split):
            return None
        index = _argument(node, 1, "dim")
        return Shape(value) if index is None else self._size_at(value, index) if type(index) is int else None

    def _size_at(self, value: Split, index: int) -> Any:
        return Size(value) if value.at(index) == value.dim else Whole()

    def _compared(self, node: fx.Node) -> Any:
        """Whether two sizes are the same is the same for the pieces."""
        values = [self._of(one) for one in node.args]
        return Whole() if all(isinstance(value, Size) for value in values) else None

    def _unflatten(self, node: fx.Node) -> Any:
        value, dim = self._of(node.args[0]), _argument(node, 1, "dim")
        sizes = _sizes([_argument(node, 2, "sizes")])
        if not isinstance(value, Split) or type(dim) is not int or value.at(dim) != -1 or len(sizes) != 2:
            return None
        return self._heads(value, *sizes)

    def _view(self, node: fx.Node) -> Any:
        """[samples, positions, width] into heads, or back."""
        value, sizes = self._of(node.args[0]), _sizes(node.args[1:])
        if not isinstance(value, Split) or node.kwargs:
            return None
        if value.rank == RANK and len(sizes) == RANK + 1:
            return self._heads(value, *sizes[-2:])
        back = value.rank == RANK + 1 and len(sizes) == RANK and sizes[-1] == -1 and value.dim == -2
        return replace(value, dim=-1, rank=RANK) if back else None

    def _flatten(self, node: fx.Node) -> Any:
        value, start, end = self._of(node.args[0]), _argument(node, 1, "start_dim"), _argument(node, 2, "end_dim")
        if not isinstance(value, Split) or type(start) is not int or value.rank != RANK + 1:
            return None
        last = value.at(start) == value.dim == -2 and (end is None or (type(end) is int and value.at(end) == -1))
        return replace(value, dim=-1, rank=RANK) if last else None

    def _heads(self, value: Split, count: Any, width: Any) -> Split | None:
        """Cut the last dim into `count` heads of `width`; a count that is written out has to be divided."""
        if value.dim != -1 or value.rank != RANK or type(count) is not int or type(width) is not int:
            return None
        if count != -1:
            self.counts[len(self.lines) - 1] = (value.sources, count)
        return replace(value, dim=-2, rank=RANK + 1)


RULES = (
    dict.fromkeys(ELEMENTWISE, "elementwise")
    | dict.fromkeys(CASTS, "cast")
    | dict.fromkeys(BINARY, "binary")
    | {"reshape": "view", "swapaxes": "transpose", "concat": "cat", "bmm": "matmul", "eq": "compared", "ne": "compared"}
)
RULED = frozenset(RULES) | {
    "matmul", "scaled_dot_product_attention", "softmax", "transpose", "permute", "chunk", "cat", "repeat_interleave",
    "getitem", "getattr", "size", "unflatten", "view", "flatten",
}  # fmt: skip
"""Names of functions and methods that have a rule."""


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _sizes(arguments: Any) -> list[Any]:
    """Return sizes or dims that were given one by one or as one sequence."""
    arguments = list(arguments)
    return list(arguments[0]) if len(arguments) == 1 and isinstance(arguments[0], (tuple, list)) else arguments


def _makes_many(node: fx.Node) -> bool:
    return (node.target if node.op == "call_method" else getattr(node.target, "__name__", "")) == "chunk"

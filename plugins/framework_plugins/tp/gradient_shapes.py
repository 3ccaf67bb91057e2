"""`tp.check_shapes=true`: every gradient is held against the shape of the piece that this rank must have.

The wanted shape is worked out from the numbers of the whole layer, not from the tensor whose gradient it is: so a
weight that was left whole, or cut along the wrong dim, is found in the first backward, and named.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from framework.errors import RunFailedError
from framework_plugins.tp.ranges import piece

WANTED = "gradient_shapes"
"""Attribute of a module: name of a direct parameter -> (its global name, shape of this rank's piece, in words)."""


def note_(module: nn.Module, name: str, word: str, ranks: int, rank: int) -> None:
    """Note on `module` the shapes of its gradients.

    Args:
        module: whole, not split yet.
        name: global name of the module.
        word: its word in the plan.
        ranks: on axis tp.
        rank: coordinate on axis tp.
    """
    wanted = {}
    for key, parameter in module.named_parameters(recurse=False):
        shape, words = _wanted(module, key, tuple(parameter.shape), word, ranks, rank)
        wanted[key] = (f"{name}.{key}", shape, words)
    setattr(module, WANTED, wanted)


def _wanted(
    module: nn.Module, key: str, shape: tuple[int, ...], word: str, ranks: int, rank: int
) -> tuple[tuple[int, ...], str]:
    if isinstance(module, nn.Embedding) and word == "embedding":
        start, end = piece(module.num_embeddings, ranks, rank)
        return (end - start, module.embedding_dim), "[rows/tp, width]"
    if isinstance(module, nn.Linear) and word in ("colwise", "head"):
        start, end = piece(module.out_features, ranks, rank)
        return ((end - start, module.in_features), "[out/tp, in]") if key == "weight" else ((end - start,), "[out/tp]")
    if isinstance(module, nn.Linear) and word == "rowwise" and key == "weight":
        start, end = piece(module.in_features, ranks, rank)
        return (module.out_features, end - start), "[out, in/tp]"
    return shape, "whole"


def watch_(tensor: Tensor, module: nn.Module, key: str) -> None:
    """Hold the gradient of `tensor`, this rank's piece of parameter `key`, against what was noted on `module`."""
    name, shape, words = getattr(module, WANTED)[key]
    tensor.register_hook(partial(_check, name, shape, words))  # type: ignore[no-untyped-call]


def _check(name: str, shape: tuple[int, ...], words: str, gradient: Tensor) -> None:
    if tuple(gradient.shape) != shape:
        raise RunFailedError(
            f"tp.check_shapes=true: the gradient of {name} has shape {list(gradient.shape)}, but this rank's piece is"
            f" {list(shape)} ({words})."
        )

"""Which layer is split how: the words of a plan, and the layers that its patterns name. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from framework.patterns import matches

WORDS = {
    "colwise": "Linear whose outputs are split; input whole, output stays split until a `rowwise` layer",
    "rowwise": "Linear whose inputs are split; the ranks' partial outputs are added up",
    "embedding": "Embedding whose rows are split; with sequence_parallel its output is cut along the sequence",
    "head": "Linear to the vocabulary, outputs split; joined again, or with loss_parallel left split for the loss",
    "norm": "layer that works on each token of the residual stream alone; all ranks hold its parameters",
    "shared": "layer between `colwise` and `rowwise` whose parameters all ranks hold (the norm of queries, say)",
    "copied": "layer that every rank computes alike on a whole input",
    "divide": "not a layer but an integer attribute (`layers.*.attention.heads`), divided by tp.size",
}
"""What a layer can be, with its meaning."""

SPLIT_WORDS = ("colwise", "rowwise", "embedding", "head")
"""Words of layers whose parameters are cut."""

HEAD_COUNTS = (
    "heads", "n_heads", "num_heads", "n_head", "num_attention_heads",
    "kv_heads", "n_kv_heads", "num_kv_heads", "n_kv_head", "num_key_value_heads",
)  # fmt: skip
"""Attributes in which attention modules keep how many heads they have."""


@dataclass(frozen=True)
class Layout:
    """A plan applied to the names of one model or stage.

    Attributes:
        words: layer name -> word, for each layer that a pattern names.
        divided: (module name, attribute), for the word `divide`.
        clashes: layer name -> the patterns that give it different words.
        unmatched: patterns that name nothing.
    """

    words: dict[str, str] = field(default_factory=dict)
    divided: list[tuple[str, str]] = field(default_factory=list)
    clashes: dict[str, list[str]] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    def named(self, *words: str) -> list[str]:
        """Return the layers that have one of `words`."""
        return [name for name, word in self.words.items() if word in words]


def resolve(plan: Mapping[str, str], names: Iterable[str]) -> Layout:
    """Apply `plan` (pattern -> word, relative to the LightningModule) to module `names`."""
    names = [name for name in names if name]
    layout = Layout()
    source: dict[str, str] = {}
    for pattern, word in plan.items():
        owner, _, attribute = pattern.rpartition(".")
        if word == "divide":
            found = [name for name in names if matches(owner, name)]
            layout.divided.extend((name, attribute) for name in found)
        else:
            found = [name for name in names if matches(pattern, name)]
            for name in found:
                if layout.words.get(name, word) != word:
                    layout.clashes.setdefault(name, [source[name]]).append(pattern)
                layout.words[name] = word
                source[name] = pattern
        if not found:
            layout.unmatched.append(pattern)
    return layout


def parent(name: str) -> str:
    """Return the name of the module that holds module `name`; empty for a top-level one."""
    return name.rpartition(".")[0]

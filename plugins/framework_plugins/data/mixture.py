"""`data=mixture`: samples of several sources, drawn by weight.

Draw number i belongs to a source, and to a sample of it, by arithmetic alone:

* the source: weights are whole numbers w, or made whole, with the sum T; of any n draws from the start on a source has
  n * w / T, rounded up or down, so weights hold in every prefix, and exactly every T draws (draws are slots of a fair
  schedule, earliest deadline first: Baruah et al., Proportionate progress, 1996);
* the sample: a source's draws go through it in random order; after its last sample it starts over in another order. Its
  round r has the order `framework.counter.permutation(derive("mixture", seed, source, r), samples)`.

An epoch is a number of draws. The next epoch draws on where it ended, so weights and rounds hold over a whole run, and
a sample's number in the ledger is the number of its draw. Ranks and workers don't come into it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, default_collate

from framework import UsageError, counter
from framework_plugins.data.windows import as_it_is

LONGEST = 100_000
"""Draws after which the schedule of the weights may repeat itself."""

ROUNDS = 2
"""Orders of a source that are kept: a batch may lie across the end of a round."""


def whole(weights: Mapping[str, float]) -> dict[str, int]:
    """Return weights that aren't zero as whole numbers without a common divisor.

    Raises:
        UsageError: one is negative, all are zero, or their schedule would be too long.
    """
    exact = {name: Fraction(str(weight)) for name, weight in weights.items() if weight}
    if not exact or min(exact.values()) < 0:
        raise UsageError(f"data.weights={dict(weights)} must be positive, and 0 where a source is left out.")
    unit = math.lcm(*(weight.denominator for weight in exact.values()))
    shares = {name: int(weight * unit) for name, weight in exact.items()}
    divisor = math.gcd(*shares.values())
    shares = {name: share // divisor for name, share in shares.items()}
    if sum(shares.values()) > LONGEST:
        raise UsageError(
            f"data.weights={dict(weights)} hold exactly only every {sum(shares.values())} draws, and {LONGEST} is the "
            "most: type short numbers, such as 3 and 1."
        )
    return shares


def schedule(shares: Sequence[int]) -> list[tuple[int, int]]:
    """Return for each of the first sum(shares) draws which source it belongs to, and how many of that came before.

    Afterwards it repeats itself. A source with share w of T may have its draw j from floor(j T / w) on, and must before
    ceil((j + 1) T / w); of the sources that may, the one that must first is taken.
    """
    total, drawn = sum(shares), [0] * len(shares)
    result = []
    for draw in range(total):
        ready = [at for at, share in enumerate(shares) if drawn[at] * total < (draw + 1) * share]
        chosen = min(ready, key=lambda at: -(-(drawn[at] + 1) * total // shares[at]))
        result.append((chosen, drawn[chosen]))
        drawn[chosen] += 1
    return result


class Mix(Dataset[Any]):
    """Draws from several data sets; a draw's number may be any, whatever the length of an epoch.

    Args:
        sources: name -> map-style data set.
        weights: name -> how often it is drawn, relative to the others; 0 = never.
        seed: of the order in each source.
        samples: draws of an epoch; None = as many as the sources have samples.
    """

    def __init__(
        self, sources: Mapping[str, Dataset[Any]], weights: Mapping[str, float], seed: int, samples: int | None = None
    ) -> None:
        self.shares = whole(weights)
        self.names = list(self.shares)
        self.sources: list[Any] = [sources[name] for name in self.names]
        self.sizes = [len(source) for source in self.sources]
        for name, size in zip(self.names, self.sizes, strict=True):
            if not size:
                raise UsageError(
                    f"data.sources.{name} has no sample: give it more data, or type data.weights.{name}=0."
                )
        self.seed = seed
        self.samples = sum(self.sizes) if samples is None else samples
        self._schedule = schedule(list(self.shares.values()))
        self._orders: list[dict[int, Tensor]] = [{} for _ in self.names]

    def __len__(self) -> int:
        return self.samples

    def place(self, draw: int) -> tuple[str, int]:
        """Return the source that a draw belongs to, and which of its samples it is."""
        number, sample = self._place(draw)
        return self.names[number], sample

    def _place(self, draw: int) -> tuple[int, int]:
        times, at = divmod(draw, len(self._schedule))
        number, before = self._schedule[at]
        turn, at = divmod(times * self.shares[self.names[number]] + before, self.sizes[number])
        return number, int(self._order(number, turn)[at])

    def _order(self, number: int, turn: int) -> Tensor:
        """Return the order of a source in its round `turn`."""
        kept = self._orders[number]
        if turn not in kept:
            if len(kept) == ROUNDS:
                del kept[next(iter(kept))]
            key = counter.derive("mixture", self.seed, self.names[number], turn)
            kept[turn] = counter.permutation(key, self.sizes[number])
        return kept[turn]

    def __getitem__(self, draw: int) -> Any:
        """Return the sample of a draw."""
        number, sample = self._place(draw)
        return self.sources[number][sample]


def _entries(data: Any) -> str:
    """Return the names of what a sample has, or its type if they have none."""
    sample = data[0]
    return ", ".join(sorted(map(str, sample))) if isinstance(sample, Mapping) else type(sample).__name__


class Draws(Sampler[int]):
    """The draws of an epoch, in order: the next ones of all that a run makes."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, as torch's DistributedSampler does."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch * self.samples, (self.epoch + 1) * self.samples))


class Mixture(LightningDataModule):
    """A weighted mixture of the training samples of several data modules, and all of their held-out ones.

    Args:
        sources: name -> data module; the samples of all must be alike.
        weights: name -> how often its samples are drawn, relative to the others; 0 = the source is left out.
        seed: of the order in each source.
        samples: draws of an epoch; None = as many as the sources have samples.
        context: tokens of a window, which token data must have; None = isn't checked.
        num_workers: processes that read ahead, a rank.
    """

    def __init__(
        self,
        *,
        sources: Mapping[str, Any],
        weights: Mapping[str, float],
        seed: int = 0,
        samples: int | None = None,
        context: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if unknown := sorted(set(sources) ^ set(weights)):
            raise ValueError(
                f"{', '.join(unknown)} must stand in data.sources and in data.weights both; a source of weight 0 is "
                "left out."
            )
        if samples is not None and samples < 1:
            raise ValueError(f"samples={samples} must be at least 1.")
        whole(weights)
        self.sources = {name: source for name, source in sources.items() if weights[name]}
        self.weights = {name: weights[name] for name in self.sources}
        for name, source in self.sources.items():
            if context is not None and getattr(source, "context", context) != context:
                raise ValueError(
                    f"data.sources.{name}.context={source.context} isn't the {context} tokens of the other samples."
                )
        self.seed, self.samples, self.num_workers = seed, samples, num_workers

    # -- Lightning's hooks -----------------------------------------------------------------------------------------
    def prepare_data(self) -> None:
        """Prepare each source; Lightning calls it on one rank a host."""
        for source in self.sources.values():
            source.trainer = self.trainer
            source.prepare_data()

    def setup(self, stage: str) -> None:
        """Set each source up."""
        for source in self.sources.values():
            source.trainer = self.trainer
            source.setup(stage)

    def _loaders(self, kind: str) -> dict[str, DataLoader[Any]]:
        loaders = {name: getattr(source, f"{kind}_dataloader")() for name, source in self.sources.items()}
        for name, loader in loaders.items():
            if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
                raise UsageError(
                    f"data.sources.{name} has no DataLoader of a map-style data set, of which sample i can be drawn."
                )
        return loaders

    def _joined(self, loaders: Mapping[str, DataLoader[Any]], data: Dataset[Any], **how: Any) -> DataLoader[Any]:
        """Return a loader of single samples of the sources."""
        entries = {name: _entries(loader.dataset) for name, loader in loaders.items() if len(loader.dataset)}  # type: ignore[arg-type]
        first, wanted = next(iter(entries.items()), ("", ""))
        for name, found in entries.items():
            if found != wanted:  # collation takes what the first sample has and leaves out the rest
                raise UsageError(
                    f"Samples of data.sources.{name} have the entries {found}, and those of data.sources.{first} have "
                    f"{wanted}: samples of one batch need the same (of data=packed, attention=window has no others)."
                )
        collates = {loader.collate_fn for loader in loaders.values()}
        collates = {default_collate if collate is as_it_is else collate for collate in collates}
        if len(collates) > 1:
            raise UsageError("The sources of data=mixture have several collate_fn; samples of one batch need one.")
        return DataLoader(
            data,
            collate_fn=collates.pop(),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            **how,
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """The draws, in order; how many make a batch is the framework's affair."""
        loaders = self._loaders("train")
        mix = Mix({name: loader.dataset for name, loader in loaders.items()}, self.weights, self.seed, self.samples)
        return self._joined(loaders, mix, sampler=Draws(len(mix)))

    def val_dataloader(self) -> DataLoader[Any]:
        """The held-out samples of all sources, one source after the other, whatever its weight."""
        loaders = self._loaders("val")
        return self._joined(loaders, ConcatDataset([loader.dataset for loader in loaders.values()]))

    def facts(self) -> dict[str, Any]:
        """Return what a plan keeps of the data; reads it all, writes nothing."""
        facts = {
            name: dict(source.facts()) if hasattr(source, "facts") else {} for name, source in self.sources.items()
        }
        shares = whole(self.weights)
        counts = [fact.get("train_samples") for fact in facts.values()]
        digest = hashlib.sha256(repr([fact.get("corpus_sha256") for fact in facts.values()]).encode())
        return {
            "sources": "; ".join(
                f"{name} {shares[name]} of {sum(shares.values())} draws"
                + (f" ({fact['train_samples']} samples)" if "train_samples" in fact else "")
                for name, fact in facts.items()
            ),
            "corpus_sha256": digest.hexdigest(),
            "train_samples": self.samples or (None if None in counts else sum(filter(None, counts))),
        }

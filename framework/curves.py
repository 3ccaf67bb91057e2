"""Read `metrics.csv` and draw `loss.png` from it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TRAIN_LOSS = ("train_loss_step", "train_loss", "train/loss", "loss_step", "loss")
"""Names under which a LightningModule may log its training loss; the first that is there is taken."""

VAL_LOSS = ("val_loss", "val/loss", "valid_loss", "validation_loss")
"""The same for the validation loss."""


def pick(metrics: Mapping[str, Any], names: Iterable[str]) -> float | None:
    """Return the value of the first of `names` that is in `metrics`, or None."""
    return next((float(metrics[name]) for name in names if name in metrics), None)


def read_table(path: Path) -> list[dict[str, str]]:
    """Read `metrics.csv` without its empty cells; a last line that was cut off by a kill is left out."""
    text = path.read_text(encoding="utf-8")
    rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
    if not rows:
        return []
    return [{name: cell for name, cell in zip(rows[0], row, strict=True) if cell} for row in rows[1:]]


def curve(rows: Iterable[Mapping[str, str]], names: Iterable[str]) -> tuple[list[int], list[float]]:
    """Return steps and values of the first of `names` that a row holds, for all rows that hold one."""
    points = [(int(row["step"]), pick({k: float(v) for k, v in row.items() if k in names}, names)) for row in rows]
    kept = [(step, value) for step, value in points if value is not None]
    return [step for step, _ in kept], [value for _, value in kept]


def draw_loss(
    table: Path,
    picture: Path,
    title: str = "",
    first: tuple[int | None, float | None] = (None, None),
    bigram_entropy: float | None = None,
) -> bool:
    """Draw training and validation loss over optimizer steps.

    Args:
        table: a `metrics.csv`.
        picture: the PNG to write.
        title: above the picture.
        first: step and loss of the first step, which is rarely one that was logged; None if not known.
        bigram_entropy: nats a token; drawn as a level line, what a model that sees one token back could reach.

    Returns:
        False, and no picture, if the table isn't there or holds no loss.
    """
    rows = read_table(table) if table.exists() else []
    train, val = curve(rows, TRAIN_LOSS), curve(rows, VAL_LOSS)
    if not train[0] and not val[0]:
        return False
    if first[0] is not None and first[1] is not None and train[0] and train[0][0] > first[0]:
        train = [first[0], *train[0]], [float(first[1]), *train[1]]
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    if train[0]:
        axes.plot(*train, color="#3b6fb6", linewidth=1.4, label="training loss")
    if val[0]:
        axes.plot(*val, color="#d1495b", marker="o", markersize=4, linewidth=1.2, label="validation loss")
    if bigram_entropy is not None:
        axes.axhline(bigram_entropy, color="#666666", linestyle="--", linewidth=1, label="bigram entropy, held out")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    new = picture.with_name(f".{picture.name}.new")
    figure.savefig(new, dpi=130, format="png")
    new.replace(picture)
    return True

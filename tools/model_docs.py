"""Write `docs/models.md` from the figures of the campaigns over kinds of models: it says what was measured.

python tools/model_docs.py          # write
python tools/model_docs.py --check  # exit code 1 if the page isn't that of the figures

The figures: python -m pytest -m campaign tests/distributed/test_families.py tests/distributed/test_hugging_face.py
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "tests" / "campaign" / "families.json"
HUGGING_FACE = ROOT / "tests" / "campaign" / "hugging_face.json"
PAGE = ROOT / "docs" / "models.md"

HEAD = """\
# Which models run in a pipeline

Written by `python tools/model_docs.py` from `tests/campaign/families.json`, the figures of
`python -m pytest -m campaign tests/distributed/test_families.py`.

A LightningModule needs no edit. There are two ways to cut it, chosen by `pp.cut`:

| `pp.cut` | where | when `auto` takes it |
|---|---|---|
| `blocks` | between the blocks of one list, the same number each (`pp.blocks`, `pp.split`) | one list holds most |
| `graph` | where a weight is first used, so that stages cost alike | else |

`auto` takes `blocks` if the model has one list of blocks, as long as there are stages, that holds at least half of the
weights, no weight is tied, and no table of positions is registered after the list. `pp.balance=flops` (or `parameters`)
asks for `graph` and says what is made alike.

## How `graph` works

The step method is followed once on the meta device with a few samples: in which order weights are used, what each part
costs, which values cross a cut. The dearest stage is then at most 1.1 x what the best contiguous cut gives; among those
cuts the one with the least to send is taken, which mostly lies between blocks. In training every stage runs your own
`training_step` from its first line: what comes before its part runs on the meta device (a module once for given
shapes), values that cross are received and sent, and the next stage's first weight ends it. So these need nothing
special: skip connections, tuples, dicts, None, integers, keyword inputs, several losses, a module without `forward`,
logged values of any stage, other batch sizes in evaluation.

- **Tied weights**, and a layer that is used on two stages: every stage that uses one holds it; gradients are added up
  before clipping, it counts once in the norm and once in a checkpoint. Two of them on one rank (V-shaped and
  interleaved schedules) can't be combined with `strategy`.
- **Batch norm** sees micro-batches. The result is that of one process that runs the same micro-batches one after the
  other, statistics included; it isn't that of one process on the whole batch.
- **Random numbers** drawn in a step are drawn on the stage that they belong to. What Python's own `random` decides (a
  layer to skip, say) may differ from stage to stage: don't let it choose what is called.
- **Values.** What needs a computed value before the last stage begins (`.item()`, a mask of activations as an index) is
  refused with the place; put it behind the loss, or cut at blocks.
- **Recomputation of your own** (`torch.utils.checkpoint`) must not have a cut inside; `activation=full` works by block.
- Under `activation`, `compile` and `strategy=fsdp` the units are the blocks that lie on one stage as a whole.

## What was measured

Float64, SGD with momentum, 3 steps of {microbatches} micro-batches of {micro_batch} samples, held against one process:
losses, gradients and updates of every parameter, and buffers. {ran} of {families} families run unedited; the largest
relative distance of anything compared is {worst:.1e}.
"""


HUGGING_FACE_HEAD = """
## Models of Hugging Face transformers

`model=hf` ([hugging_face.md](hugging_face.md)), two layers of width 32, unedited: float64, 3 steps, held against one
process by `python -m pytest -m campaign tests/distributed/test_hugging_face.py`, with the figures in
`tests/campaign/hugging_face.json`. A cell is the largest relative distance of anything compared.
"""


def of_hugging_face(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of mixes down and models across, and below it why one is refused."""
    models = list(dict.fromkeys(row["model_type"] for row in rows))
    cells = {(row["mix"], row["model_type"]): row for row in rows}
    lines = ["| mix | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    for mix in dict.fromkeys(row["mix"] for row in rows):
        lines.append(f"| `{mix}` | " + " | ".join(distance(cells[mix, model]) for model in models) + " |")
    why = dict.fromkeys(f"{row['model_type']}, {row['lines'][0]}" for row in rows if row["verdict"] == "refused")
    return "\n".join([*lines, "", *(f"- Refused: {reason}" for reason in why)]).rstrip()


def distance(row: Mapping[str, Any]) -> str:
    """Return one cell."""
    return f"{row['worst']:.1e}" if row["verdict"] == "equal" else row["verdict"]


def page() -> str:
    """Return the whole page."""
    figures = json.loads(FIGURES.read_text())
    rows = figures["rows"]
    families: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        families[row["family"]].append(row)
    ran = [row for row in rows if not row["refused"]]
    head = HEAD.format(
        microbatches=figures["microbatches"],
        micro_batch=figures["micro_batch"],
        ran=sum(all(not row["refused"] and not row["lines"] for row in some) for some in families.values()),
        families=len(families),
        worst=max(row["worst"] for row in ran),
    )
    return (
        f"{head}\n{table(rows)}\n{HUGGING_FACE_HEAD}\n{of_hugging_face(json.loads(HUGGING_FACE.read_text())['rows'])}\n"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one line for each family and number of stages."""
    lines = ["| model | stages | later stages begin at | dearest stage / best cut | worst distance |", "|---" * 5 + "|"]
    for row in rows:
        if row["refused"]:
            lines.append(f"| {row['family']} | {row['stages']} | refused: {row['refused']} | | |")
            continue
        worst = "**wrong**" if row["lines"] else f"{row['worst']:.1e}"
        begins = ", ".join(f"`{name}`" for name in row["cut"])
        lines.append(f"| {row['family']} | {row['stages']} | {begins} | {row['dearest']:.2f} | {worst} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE.name} is out of date: type python tools/model_docs.py")
    PAGE.write_text(page())

"""Plans by hand, from the shipped YAML and nothing else: what a test needs that is not about the front end."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import Any

import yaml

from framework.plan import BatchSpec, MeshSpec, RunPlan

CONF = Path(__file__).parent.parent / "conf"


def option(slot: str, name: str, **fields: Any) -> dict[str, Any]:
    """Describe an option as `compose` would: defaults from its YAML, `fields` over them."""
    values = yaml.safe_load((CONF / slot / f"{name}.yaml").read_text())
    unknown = set(fields) - set(values)
    assert not unknown, f"{slot}={name} has no {unknown}"
    return {**values, "option": name, **fields}


def make_plan(
    world_size: int = 1,
    *,
    strategy: str | None = None,
    pp: str | None = None,
    tp: int = 1,
    stages: int = 2,
    microbatches: int = 1,
    accumulation: int = 1,
    micro_batch_size: int = 1,
    precision: str = "fp32",
    run_dir: str | None = None,
    trainer: dict[str, Any] | None = None,
    components: dict[str, Any] | None = None,
    **fields: Any,
) -> RunPlan:
    """Return a plan; the batch is given by its smallest piece, ranks left over are the data axis of `strategy`."""
    pipeline = stages if pp else 1
    data = world_size // (pipeline * tp)
    assert data * pipeline * tp == world_size
    mesh = MeshSpec(pp=pipeline, tp=tp, **{"dp_shard" if strategy == "fsdp" else "dp_replicate": data})
    chosen: dict[str, Any] = {
        "precision": option("precision", precision),
    }
    if (CONF / "sampler" / "consistent.yaml").exists():
        chosen["sampler"] = option("sampler", "consistent", shuffle=False)
    if strategy:
        chosen["strategy"] = option("strategy", strategy)
    if pp:
        chosen["pp"] = option("pp", pp, size=stages, microbatches=microbatches)
    if tp > 1:
        chosen["tp"] = option("tp", "dtensor", size=tp)
    return RunPlan(
        run_id=uuid.uuid4().hex[:8],
        run_dir=run_dir or tempfile.mkdtemp(prefix="run-"),
        mesh=mesh,
        batch=BatchSpec(
            global_batch_size=data * accumulation * microbatches * micro_batch_size,
            micro_batch_size=micro_batch_size,
            microbatches=microbatches,
            accumulation=accumulation,
            data_ranks=data,
        ),
        threads=1,
        timeout_s=60.0,
        trainer={
            "max_epochs": 1,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "num_sanity_val_steps": 0,
            **(trainer or {}),
        },
        components={**chosen, **(components or {})},
        **fields,
    )

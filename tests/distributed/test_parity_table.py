"""What the table of mixes must hold."""

from __future__ import annotations

from collections import Counter

from mixes import MIXES

OPTIONS = (
    [f"strategy={name}" for name in ("ddp", "fsdp")]
    + [f"strategy.sharding={name}" for name in ("shard_grad_op",)]
    + ["strategy.replicas=2", "strategy.cpu_offload=true", "tp=dtensor", "tp=megatron", "compile=block"]
    + ["tp.sequence_parallel=true", "tp.loss_parallel=true", "activation=full", "activation=selective"]
    + ["cp=ring", "cp=allgather", "cp=ulysses", "cp.balance=none"]
    + [f"pp={name}" for name in ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev"]]
    + [f"precision={name}" for name in ("fp64", "fp32", "bf16-mixed", "bf16-true", "fp16-mixed")]
    + ["trainer.accumulate_grad_batches", "trainer.gradient_clip_val"]
    + [f"trainer.gradient_clip_algorithm={name}" for name in ("norm", "inf_norm", "value")]
)


def words(mix) -> set[str]:
    settings = dict(mix.settings)
    if "trainer.gradient_clip_val" in settings:
        settings.setdefault("trainer.gradient_clip_algorithm", "norm")
    return {f"{key}={value}" for key, value in settings.items()} | set(settings)


def test_there_are_at_least_forty_different_mixes():
    assert len({frozenset(mix.settings.items()) | {mix.ranks} for mix in MIXES}) == len(MIXES) >= 40
    assert len({mix.name for mix in MIXES}) == len(MIXES)


def test_every_option_stands_in_two_rows():
    counts = Counter(word for mix in MIXES for word in words(mix))
    assert {option: counts[option] for option in OPTIONS if counts[option] < 2} == {}


def test_eight_processes_stand_in_two_rows_and_every_concern_meets_every_other():
    assert sum(mix.ranks == 8 for mix in MIXES) >= 2
    concerns = (
        "strategy",
        "tp",
        "pp",
        "cp",
        "activation",
        "trainer.accumulate_grad_batches",
        "trainer.gradient_clip_val",
    )
    met = {(a, b) for mix in MIXES for a in concerns for b in concerns if {a, b} <= set(mix.settings)}
    assert {(a, b) for a in concerns for b in concerns} <= met

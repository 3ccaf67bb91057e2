"""The table of mixes that parity is measured on: the words that a user would type, the ranks, and how near is equal.

Each row trains the default GPT, shrunk, for `STEPS` optimizer steps of `GLOBAL_BATCH` samples with SGD and momentum.
Every option of strategy, tp, pp, precision, activation, accumulation and clipping stands in at least two rows, eight
ranks in at least two; `test_parity_table.py` holds the table to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from framework.verify.mixes import cover
from framework.verify.reference import Bounds

STEPS = 6
GLOBAL_BATCH = 16
SEQUENCE = 8

FP64 = Bounds()
FP32 = Bounds(loss=1e-6, gradient=1e-5, update=1e-5, floor=0.1)  # a small update of a weight near 1 is rounded
BF16_MIXED = Bounds(loss=2e-3, gradient=2e-2, update=4e-2, floor=0.03)
BF16_TRUE = Bounds(loss=1e-2, gradient=5e-2, update=0.2, floor=0.03, moves=0.0)
FP16_MIXED = Bounds(loss=2e-4, gradient=4e-3, update=4e-3, floor=0.03)
BOUNDS = {"fp64": FP64, "fp32": FP32, "bf16-mixed": BF16_MIXED, "bf16-true": BF16_TRUE, "fp16-mixed": FP16_MIXED}
"""Low precision is compared with one process of the same precision; each planted fault exceeds these bounds."""


@dataclass(frozen=True)
class Mix:
    """One row.

    Attributes:
        name: unique, readable.
        ranks: processes.
        words: overrides as typed, `precision` among them or fp64.
    """

    name: str
    ranks: int
    words: str = ""

    @property
    def settings(self) -> dict[str, str]:
        """The words by key."""
        settings = dict(word.split("=", 1) for word in self.words.split())
        settings.setdefault("precision", "fp64")
        return settings

    @property
    def overrides(self) -> list[str]:
        """What is handed to the front end, complete."""
        batch = {} if "global_batch_size" in self.settings else {"global_batch_size": str(GLOBAL_BATCH)}
        return [f"{key}={value}" for key, value in {**self.settings, **batch, "devices": str(self.ranks)}.items()]

    @property
    def bounds(self) -> Bounds:
        """How near to the reference is equal."""
        return BOUNDS[self.settings["precision"]]

    @property
    def clip(self) -> tuple[float | None, str]:
        """Bound of the gradient, None = no clipping; and the algorithm."""
        value = self.settings.get("trainer.gradient_clip_val")
        return (float(value) if value else None), self.settings.get("trainer.gradient_clip_algorithm", "norm")


FSDP = "strategy=fsdp"
SGO = "strategy=fsdp strategy.sharding=shard_grad_op"
OVERLAP = "strategy.reduction=overlap"
TP = "tp=dtensor"
SP = "tp=dtensor tp.sequence_parallel=true"
LP = "tp=dtensor tp.loss_parallel=true"
SP_LP = "tp=dtensor tp.sequence_parallel=true tp.loss_parallel=true"
MEGATRON = "tp=megatron"
SWITCHES = "tp.sequence_parallel=true tp.loss_parallel=true"
CLIP = "trainer.gradient_clip_val=0.5"
CLIP_INF = "trainer.gradient_clip_val=0.01 trainer.gradient_clip_algorithm=inf_norm"
CLIP_VALUE = "trainer.gradient_clip_val=0.003 trainer.gradient_clip_algorithm=value"
FP16 = "precision=fp16-mixed precision.init_scale=1024"  # the default scale may overflow at first, as it should
ACC2 = "trainer.accumulate_grad_batches=2"
ACC4 = "trainer.accumulate_grad_batches=4"
COMPILED = "compile=block compile.backend=aot_eager"
RING = "cp=ring"
GATHER = "cp=allgather"
HEADS = "cp=ulysses"
BUDGET = "activation=selective activation.budget=0.5"
OFFLOAD = "activation=offload activation.to=disk activation.min_bytes=0"
M4 = "pp.microbatches=4"
M2 = "pp.microbatches=2"

MIXES = [
    # one process
    Mix("single", 1),
    Mix("single, accumulation", 1, ACC4),
    Mix("single, clip norm, full AC", 1, f"{CLIP} activation=full"),
    Mix("single, clip value, accumulation", 1, f"{CLIP_VALUE} {ACC2}"),
    Mix("pp alone on one rank's worth", 2, f"pp=gpipe {M4}"),
    # ddp
    Mix("ddp2", 2, "strategy=ddp"),
    Mix("ddp2, accumulation, clip norm", 2, f"strategy=ddp {ACC4} {CLIP}"),
    Mix("ddp4, full AC, clip inf", 4, f"strategy=ddp activation=full {CLIP_INF}"),
    Mix("ddp2, find_unused_parameters", 2, "strategy=ddp strategy.find_unused_parameters=true"),
    Mix("ddp2, static graph, selective AC", 2, "strategy=ddp strategy.static_graph=true activation=selective"),
    Mix("ddp2 overlap, accumulation, clip norm", 2, f"strategy=ddp {OVERLAP} {ACC4} {CLIP}"),
    Mix("ddp2 overlap, find_unused_parameters", 2, f"strategy=ddp {OVERLAP} strategy.find_unused_parameters=true"),
    # fsdp
    Mix("full_shard2", 2, FSDP),
    Mix("full_shard2, find_unused_parameters, accumulation", 2, f"{FSDP} strategy.find_unused_parameters=true {ACC2}"),
    Mix("full_shard4, accumulation, full AC", 4, f"{FSDP} {ACC2} activation=full"),
    Mix("full_shard2, full AC, clip norm", 2, f"{FSDP} activation=full {CLIP}"),
    Mix("full_shard2, clip value", 2, f"{FSDP} {CLIP_VALUE}"),
    Mix("shard_grad_op2", 2, SGO),
    Mix("shard_grad_op4, accumulation, clip inf", 4, f"{SGO} {ACC4} {CLIP_INF}"),
    Mix("hybrid 2x2", 4, f"{FSDP} strategy.replicas=2"),
    Mix("hybrid 2x2 grad_op, accumulation, clip", 4, f"{SGO} strategy.replicas=2 {ACC2} {CLIP}"),
    Mix("cpu offload 2", 2, f"{FSDP} strategy.cpu_offload=true"),
    Mix(
        "cpu offload hybrid, accumulation, clip",
        4,
        f"{FSDP} strategy.cpu_offload=true strategy.replicas=2 {ACC2} {CLIP}",
    ),
    # tp
    Mix("tp2", 2, TP),
    Mix("tp4, clip norm", 4, f"{TP} tp.size=4 {CLIP}"),
    Mix("tp2 sp, accumulation", 2, f"{SP} {ACC2}"),
    Mix("tp2 loss parallel, clip value", 2, f"{LP} {CLIP_VALUE}"),
    Mix("tp4 sp loss parallel, clip inf", 4, f"{SP_LP} tp.size=4 {CLIP_INF}"),
    Mix("ddp2 x tp2", 4, f"strategy=ddp {TP}"),
    Mix("ddp2 x tp2 sp lp, accumulation, clip", 4, f"strategy=ddp {SP_LP} {ACC2} {CLIP}"),
    Mix("ddp2 overlap x tp2, accumulation", 4, f"strategy=ddp {OVERLAP} {TP} {ACC2}"),
    Mix("full_shard2 x tp2 sp, selective AC", 4, f"{FSDP} {SP} activation=selective"),
    Mix("full_shard2 x tp2 lp, accumulation, clip", 4, f"{FSDP} {LP} {ACC2} {CLIP}"),
    Mix("hybrid 2x2 x tp2, clip", 8, f"{FSDP} strategy.replicas=2 {TP} {CLIP}"),
    Mix("megatron2 sp lp, accumulation, clip", 2, f"{MEGATRON} {SWITCHES} {ACC2} {CLIP}"),
    Mix("ddp2 x megatron2 sp, clip value", 4, f"strategy=ddp {MEGATRON} tp.sequence_parallel=true {CLIP_VALUE}"),
    Mix("full_shard2 x megatron2, selective AC, clip", 4, f"{FSDP} {MEGATRON} activation=selective {CLIP}"),
    # pp alone
    Mix("gpipe2, accumulation, clip", 2, f"pp=gpipe {M4} {ACC2} {CLIP}"),
    Mix("1f1b2", 2, f"pp=1f1b {M4}"),
    Mix("1f1b4, full AC", 4, f"pp=1f1b pp.size=4 {M4} activation=full"),
    Mix("interleaved2, clip", 2, f"pp=interleaved_1f1b {M4} {CLIP}"),
    Mix("looped_bfs2, accumulation", 2, f"pp=looped_bfs {M4} {ACC2}"),
    Mix("zero_bubble2, clip inf", 2, f"pp=zero_bubble {M4} {CLIP_INF}"),
    Mix("zbv2, accumulation, clip", 2, f"pp=zbv {M4} {ACC2} {CLIP}"),
    Mix("dualpipev2, clip value", 2, f"pp=dualpipev {M4} {CLIP_VALUE}"),
    # pp x data parallel
    Mix("gpipe2 x full_shard2, clip", 4, f"{FSDP} pp=gpipe {M4} {CLIP}"),
    Mix("gpipe2 x ddp2, accumulation", 4, f"strategy=ddp pp=gpipe {M2} {ACC2}"),
    Mix("1f1b2 x full_shard2, accumulation, AC", 4, f"{FSDP} pp=1f1b {M4} {ACC2} activation=selective"),
    Mix("1f1b2 x ddp2, full AC, clip", 4, f"strategy=ddp pp=1f1b {M4} activation=full {CLIP}"),
    Mix("interleaved2 x full_shard2, full AC", 4, f"{FSDP} pp=interleaved_1f1b {M4} activation=full"),
    Mix("1f1b2 x ddp2 overlap, clip", 4, f"strategy=ddp {OVERLAP} pp=1f1b {M4} {CLIP}"),
    Mix("zero_bubble2 x ddp2 overlap, accumulation", 4, f"strategy=ddp {OVERLAP} pp=zero_bubble {M4} {ACC2}"),
    Mix("looped_bfs2 x ddp2, clip", 4, f"strategy=ddp pp=looped_bfs {M4} {CLIP}"),
    Mix("zero_bubble2 x shard_grad_op2, accumulation", 4, f"{SGO} pp=zero_bubble {M4} {ACC2}"),
    Mix("zbv2 x full_shard2, full AC", 4, f"{FSDP} pp=zbv {M4} activation=full"),
    Mix("dualpipev2 x ddp2, clip", 4, f"strategy=ddp pp=dualpipev {M4} {CLIP}"),
    # compiled
    Mix("compiled full_shard2, full AC, clip", 2, f"{FSDP} activation=full {CLIP} {COMPILED}"),
    Mix("compiled tp2 sp, selective AC", 2, f"{SP} activation=selective {COMPILED}"),
    Mix("compiled zbv2, accumulation", 2, f"pp=zbv {M4} {ACC2} {COMPILED}"),
    # pp x tp, and everything
    Mix("gpipe2 x tp2 sp", 4, f"{SP} pp=gpipe {M4}"),
    Mix("zero_bubble2 x tp2, clip", 4, f"{TP} pp=zero_bubble {M4} {CLIP}"),
    Mix("zbv2 x tp2 lp, selective AC", 4, f"{LP} pp=zbv {M4} activation=selective"),
    Mix("1f1b2 x full_shard2 x tp2 sp lp, accumulation, clip", 8, f"{FSDP} {SP_LP} pp=1f1b {M2} {ACC2} {CLIP}"),
    Mix("zbv2 x megatron2 sp, full AC", 4, f"{MEGATRON} tp.sequence_parallel=true pp=zbv {M4} activation=full"),
    Mix("1f1b2 x megatron2 lp, clip", 4, f"{MEGATRON} tp.loss_parallel=true pp=1f1b {M4} {CLIP}"),
    Mix("zbv2 x ddp2 x tp2, clip", 8, f"strategy=ddp {TP} pp=zbv {M4} {CLIP}"),
    Mix("dualpipev2 x hybrid 2x2", 8, f"{FSDP} strategy.replicas=2 pp=dualpipev {M4}"),
    # cp
    Mix("ring2, accumulation", 2, f"{RING} {ACC2}"),
    Mix("ring4, full AC, clip", 4, f"{RING} cp.size=4 activation=full {CLIP}"),
    Mix("ring2 unbalanced x ddp2, accumulation", 4, f"strategy=ddp {RING} cp.balance=none {ACC4}"),
    Mix("ring2 x full_shard2, selective AC, clip", 4, f"{FSDP} {RING} activation=selective {CLIP}"),
    Mix("ring2 x 1f1b2, full AC", 4, f"pp=1f1b {M2} {RING} activation=full"),
    Mix("ring2 x full_shard2 x tp2 sp lp, accumulation, clip", 8, f"{FSDP} {RING} {SP_LP} {ACC2} {CLIP}"),
    Mix(
        "allgather4 unbalanced, selective AC, clip",
        4,
        f"{GATHER} cp.size=4 cp.balance=none activation=selective {CLIP}",
    ),
    Mix("allgather2 x hybrid 2x1", 4, f"{FSDP} strategy.replicas=2 strategy.size=1 {GATHER}"),
    Mix("ulysses4, clip inf", 4, f"{HEADS} cp.size=4 {CLIP_INF}"),
    Mix("ulysses2 x tp2 sp", 4, f"{HEADS} {SP}"),
    Mix("ulysses2 x zbv2, accumulation", 4, f"pp=zbv {M4} {HEADS} {ACC2}"),
    # part of the activations kept
    Mix("ddp2, budget, accumulation, clip", 2, f"strategy=ddp {BUDGET} {ACC2} {CLIP}"),
    Mix("full_shard2 x tp2 sp, budget", 4, f"{FSDP} {SP} {BUDGET}"),
    Mix("megatron2 sp lp, budget", 2, f"{MEGATRON} {SWITCHES} {BUDGET}"),
    Mix("zbv2 x full_shard2, budget", 4, f"{FSDP} pp=zbv {M4} {BUDGET}"),
    Mix("1f1b2 x tp2, budget, accumulation", 4, f"{TP} pp=1f1b {M4} {ACC2} {BUDGET}"),
    Mix("ring4 unbalanced, budget, clip", 4, f"{RING} cp.size=4 cp.balance=none {BUDGET} {CLIP}"),
    # activations on disk
    Mix("ddp2, offload, accumulation, clip", 2, f"strategy=ddp {OFFLOAD} {ACC2} {CLIP}"),
    Mix("full_shard2 x tp2 sp, offload", 4, f"{FSDP} {SP} {OFFLOAD}"),
    Mix("megatron2 sp lp, offload", 2, f"{MEGATRON} {SWITCHES} {OFFLOAD}"),
    Mix("zbv2 x full_shard2, offload", 4, f"{FSDP} pp=zbv {M4} {OFFLOAD}"),
    Mix("1f1b2 x ddp2, offload, clip", 4, f"strategy=ddp pp=1f1b {M4} {CLIP} {OFFLOAD}"),
    Mix("ring2 x full_shard2, offload, accumulation", 4, f"{FSDP} {RING} {ACC2} {OFFLOAD}"),
    # other precisions
    Mix("fp32 single", 1, "precision=fp32"),
    Mix("fp32 gpipe2 x full_shard2, clip", 4, f"precision=fp32 {FSDP} pp=gpipe {M4} {CLIP}"),
    Mix("fp32 ddp2 x tp2 sp, accumulation", 4, f"precision=fp32 strategy=ddp {SP} {ACC2}"),
    Mix("bf16-mixed single", 1, "precision=bf16-mixed"),
    Mix("bf16-mixed ddp2, accumulation", 2, f"precision=bf16-mixed strategy=ddp {ACC2}"),
    Mix("bf16-mixed full_shard2, clip", 2, f"precision=bf16-mixed {FSDP} {CLIP}"),
    Mix("bf16-mixed 1f1b2 x full_shard2, full AC", 4, f"precision=bf16-mixed {FSDP} pp=1f1b {M4} activation=full"),
    Mix("bf16-mixed full_shard2, offload", 2, f"precision=bf16-mixed {FSDP} {OFFLOAD}"),
    Mix("bf16-mixed tp2", 2, f"precision=bf16-mixed {TP}"),
    Mix("bf16-mixed ring2 x full_shard1", 2, f"precision=bf16-mixed {FSDP} strategy.size=1 {RING}"),
    Mix("bf16-true single", 1, "precision=bf16-true"),
    Mix("bf16-true ddp2", 2, "precision=bf16-true strategy=ddp"),
    Mix("bf16-true full_shard2", 2, f"precision=bf16-true {FSDP}"),
    Mix("bf16-true zbv2", 2, f"precision=bf16-true pp=zbv {M4}"),
    Mix("fp16-mixed single", 1, FP16),
    Mix(
        "fp16-mixed ddp2, accumulation, clip",
        2,
        f"{FP16} strategy=ddp {ACC2} {CLIP}",
    ),
    Mix("fp16-mixed full_shard2", 2, f"{FP16} {FSDP}"),
    Mix(
        "fp16-mixed gpipe2 x ddp2, clip",
        4,
        f"{FP16} strategy=ddp pp=gpipe {M4} {CLIP}",
    ),
    Mix("fp16-mixed full_shard2, accumulation, full AC, clip", 2, f"{FP16} {FSDP} {ACC2} activation=full {CLIP}"),
    Mix("fp16-mixed tp2 sp, accumulation, budget, clip", 2, f"{FP16} {SP} {ACC2} {BUDGET} {CLIP}"),
    Mix(
        "fp16-mixed 1f1b2 x ddp2, accumulation, selective AC",
        4,
        f"{FP16} strategy=ddp pp=1f1b {M2} {ACC2} activation=selective",
    ),
    Mix("fp16-mixed zbv2", 2, f"{FP16} pp=zbv {M4}"),
]

CONCERNS = ("strategy", "tp", "pp", "cp", "activation", "trainer.accumulate_grad_batches", "trainer.gradient_clip_val")
OPTIONS = (
    [f"strategy={name}" for name in ("ddp", "fsdp")]
    + [f"strategy.sharding={name}" for name in ("shard_grad_op",)]
    + ["strategy.replicas=2", "strategy.cpu_offload=true", "tp=dtensor", "tp=megatron", "compile=block"]
    + ["tp.sequence_parallel=true", "tp.loss_parallel=true", "activation=full", "activation=selective"]
    + ["activation.budget=0.5", "activation=offload"]
    + ["cp=ring", "cp=allgather", "cp=ulysses", "cp.balance=none"]
    + [f"pp={name}" for name in ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev"]]
    + [f"precision={name}" for name in ("fp64", "fp32", "bf16-mixed", "bf16-true", "fp16-mixed")]
    + ["trainer.accumulate_grad_batches", "trainer.gradient_clip_val"]
    + [f"trainer.gradient_clip_algorithm={name}" for name in ("norm", "inf_norm", "value")]
)


def words(mix: Mix) -> set[str]:
    """Return what a row has: settings by value, and their keys."""
    settings = dict(mix.settings)
    if "trainer.gradient_clip_val" in settings:
        settings.setdefault("trainer.gradient_clip_algorithm", "norm")
    return {f"{key}={value}" for key, value in settings.items()} | set(settings)


def _held(mix: Mix) -> set[str]:
    concerns = [concern for concern in CONCERNS if concern in mix.settings]
    pairs = {f"{one} x {other}" for one, other in combinations(concerns, 2)}
    return {word for word in words(mix) if word in OPTIONS} | pairs | {f"{mix.ranks} ranks"}


IN_SUITE = cover(MIXES, _held, lambda mix: mix.ranks, times=2, least=40)
"""Each option, pair of concerns and number of ranks in two rows; `make campaign` runs all."""

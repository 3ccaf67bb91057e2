"""Dropout under every kind of mix, held against one process without a Trainer, by `verify` itself."""

from __future__ import annotations

import pytest

from framework import cli
from framework.errors import EXIT_OK

GPT = [
    "model.layers=4", "model.width=16", "model.heads=4", "model.hidden=32", "model.context=16", "model.dropout=0.2",
    "global_batch_size=8",
]  # fmt: skip
HIDDEN = [
    "model._target_=framework.verify.toys.Biased", "model.dropout=0.2", "data._target_=framework.verify.toys.Padded",
    "data.length=16", "global_batch_size=8",
]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["+strategy=ddp", "trainer.accumulate_grad_batches=2", "+activation=full", *GPT],
        ["+strategy=fsdp", "+tp=dtensor", "tp.sequence_parallel=true", *GPT],
        ["+pp=zbv", "+activation=selective", *GPT],
        ["+pp=pipedream", "+activation=full", *GPT],
        ["+cp=ring", "+tp=megatron", "tp.sequence_parallel=true", *GPT],
        ["+strategy=deepspeed", *GPT],
        ["+tp=megatron", "+strategy=ddp", *HIDDEN],
    ],
    ids=lambda words: " ".join(word for word in words if word.startswith("+")),
)
def test_a_mix_with_dropout_equals_one_process(words, capsys):
    assert cli.main(["verify", "--steps", "2", *words]) == EXIT_OK, capsys.readouterr()
    assert "off" not in capsys.readouterr().err

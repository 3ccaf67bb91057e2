"""`model=hf`: a causal language model of Hugging Face transformers, unedited.

Nothing is downloaded and no code of a model's folder is run: a model is built from its configuration, or read from a
folder of this host, weights as safetensors only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework_plugins.model.gpt import LanguageModel, cross_entropy

WORDS = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "embedding_rowwise": "embedding",
    "colwise_gather_output": "head",
}
"""What transformers calls a way of splitting a layer -> the word of the concern `tp`."""

CAUSAL = "causal_without_mask"
"""Our name of transformers' own scaled dot-product attention; under it no mask is made."""

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""A configuration's size where neither `config` nor `path` says one; what a model type doesn't know is left out."""


class CausalLM(LanguageModel):
    """A causal language model over token ids; batches and loss are those of `model=gpt`.

    It is built without memory and filled shard by shard like any module with `init_weights`.

    Args:
        model_type: as transformers calls it; not read if there is a `path`.
        path: folder with `config.json`, and `*.safetensors` that training starts from; None = weights are drawn.
        config: fields of the configuration that differ from its defaults.
        vocab_size: number of token ids.
        context: longest sequence, tokens.

    Raises:
        ImportError: transformers isn't installed.
        ValueError: transformers doesn't know the model type, or a field of its configuration.
    """

    def __init__(
        self,
        *,
        model_type: str = "llama",
        path: str | None = None,
        config: Mapping[str, Any] | None = None,
        vocab_size: int = 256,
        context: int = 128,
    ) -> None:
        super().__init__()
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            text = "model=hf needs the package transformers: pip install 'lightning-framework[hf]'"
            raise ImportError(text) from error
        self.context = context
        self.path = None if path is None else Path(path)
        if self.path is None:
            described = describe(model_type, {"vocab_size": vocab_size, "context": context, **SMALL}, config or {})
        else:
            stored = json.loads((self.path / "config.json").read_text())
            described = describe(stored.pop("model_type"), {}, {**stored, **(config or {})})
        build: Any = AutoModelForCausalLM.from_config
        self.lm = build(described, attn_implementation=attention(described, context))

    @property
    def tp_plan(self) -> dict[str, str] | None:
        """Which layer may be split how, from the model's own plan; None = it has none."""
        own = getattr(self.lm, "tp_plan", None) or {}
        return {f"lm.{pattern}": WORDS.get(word, word) for pattern, word in own.items()} or None

    @classmethod
    def hugging_face_form(
        cls, *, model_type: str, path: str | None, config: Mapping[str, Any] | None, vocab_size: int, context: int
    ) -> tuple[str, dict[str, str]]:
        """Return what `python -m framework export --to hf` needs, from the settings of a run.

        Returns:
            The prefix of the names that are transformers' own, and the files beside the weights: name -> text.
        """
        with torch.device("meta"):
            module = cls(model_type=model_type, path=path, config=config, vocab_size=vocab_size, context=context)
        return "lm.", {"config.json": module.lm.config.to_json_string(use_diff=False)}

    def init_weights(self) -> None:
        """Draw all weights as the model's author says, then read those that `path` has.

        Raises:
            ValueError: the files don't hold exactly this model's parameters.
        """
        self.lm.initialize_weights()
        if self.path is None:
            return
        from safetensors import safe_open

        missing = dict(self.lm.named_parameters())
        aliases = {name for name, _ in self.lm.named_parameters(remove_duplicate=False)} - missing.keys()
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    if name in missing:
                        missing.pop(name).copy_(tensors.get_tensor(name))
                    elif name not in aliases:
                        raise ValueError(f"{file} has {name}, which {type(self.lm).__name__} doesn't know.")
        if missing:
            raise ValueError(f"No *.safetensors in {self.path} has {', '.join(sorted(missing)[:3])}.")

    def forward(self, inputs: Tensor) -> Tensor:
        """Map token ids [batch, length] to logits [batch, length, vocab_size]."""
        if inputs.shape[-1] > self.context:  # whether a mask is needed was decided by it
            raise ValueError(f"A sequence of {inputs.shape[-1]} tokens is longer than context={self.context}.")
        logits: Tensor = self.lm(input_ids=inputs, use_cache=False).logits
        return logits

    def loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean cross entropy in nats over the targets that count, and how many they are."""
        return cross_entropy(self(batch["inputs"]), batch["targets"])


def attention(config: Any, context: int) -> str:
    """Return the attention that a model runs with: a causal one that makes no mask, if that is all it needs.

    To find out whether a mask is needed transformers reads values of a batch, which costs a wait for the device, and
    can't be done where a pipeline runs what comes before its stage without values.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds <= {"full_attention", "sliding_attention"} and (window is None or window >= context):
        AttentionInterface.register(CAUSAL, sdpa_attention_forward)
        return CAUSAL
    return "sdpa"


def describe(model_type: str, defaults: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    """Return a configuration of transformers.

    Args:
        model_type: as transformers calls it.
        defaults: fields that are set if the model type has them; `context` is the longest sequence.
        fields: fields that it must have.

    Raises:
        ValueError: it doesn't know the model type or a field.
    """
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        near = get_close_matches(model_type, CONFIG_MAPPING, n=3)
        raise ValueError(f"transformers has no model type {model_type!r}; near are {', '.join(near) or 'none'}.")
    cls = CONFIG_MAPPING[model_type]
    usual = cls()
    given: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }  # a model is trained, not asked
    for name, value in defaults.items():
        field = "max_position_embeddings" if name == "context" else name
        if hasattr(usual, field):
            given[cls.attribute_map.get(field, field)] = value
    for name, value in fields.items():
        if not hasattr(usual, name):
            near = get_close_matches(name, vars(usual), n=1)
            raise ValueError(f"{cls.__name__} has no field {name!r}" + (f"; near is {near[0]!r}." if near else "."))
        given[cls.attribute_map.get(name, name)] = value
    return cls(**given)

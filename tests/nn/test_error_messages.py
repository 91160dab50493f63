"""What modules and their configurations say about wrong arguments: argument, rule and value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from effasr.data.prompt import Prompt
from effasr.nn.attention import RelativeSelfAttention
from effasr.nn.experts import ExpertsConfig
from effasr.nn.lora import LoRAConfig, adapt
from effasr.nn.parameters import freeze, matching
from effasr_kernels import PackedLayout
from tests.nn.test_lora import Block
from tests.support.speech_llm import speech_llm

NAMED = ExpertsConfig(count=3, route="language", names=("de", "en", "fr"))
CONFIGURATIONS: list[tuple[type, dict[str, Any], str]] = [
    (
        *(ExpertsConfig, {"route": "name"}),
        "`route` must be one of task, language, learned, but is 'n",
    ),
    (ExpertsConfig, {"count": 0}, "`count` must be at least 1, but is 0"),
    (ExpertsConfig, {"count": 2, "top_k": 3}, "`top_k` must be in 1 to count = 2, but is 3"),
    (ExpertsConfig, {"balance": -1.0}, "`balance` must be at least 0, but is -1.0"),
    (ExpertsConfig, {"names": ("a",)}, "`names` must be empty where a router chooses"),
    (
        *(ExpertsConfig, {"route": "task", "count": 2}),
        "`names` must be 2 different names, one for each expert",
    ),
    (
        *(ExpertsConfig, {"route": "task", "count": 2, "names": ("a", "b"), "top_k": 2}),
        "`top_k` must be 1 where the task chooses the expert, but is 2",
    ),
    (LoRAConfig, {"rank": 0}, "`rank` must be at least 1, but is 0"),
    (LoRAConfig, {"alpha": 0.0}, "`alpha` must be positive"),
    (LoRAConfig, {"dropout": 1.0}, r"`dropout` must be in \[0, 1\)"),
    (LoRAConfig, {"targets": ()}, "`targets` must have at least one pattern"),
]
CALLS: list[tuple[Callable[[], Any], str]] = [
    *(
        (lambda options=options: adapt(Block(), LoRAConfig(**options)), f"`lora.{message}")
        for options, message in (
            ({"targets": ("linear",)}, "targets` .* 'linear' matches none.*'linear1'"),
            ({"targets": ("norm",)}, "targets` .* 'norm' matches none"),
            ({"also_train": ("nrom",)}, "also_train` .* 'nrom' matches none"),
        )
    ),
    (
        lambda: matching(["head.b", "encoder.layers.0"], ["head", "encoder.layer.*"], "freeze"),
        r"`freeze` .* 'encoder.layer.\*' matches none: did you mean 'encoder.layers'",
    ),
    (lambda: freeze(nn.Linear(2, 2), ["*"]), "`freeze` must leave something to train"),
    (
        lambda: RelativeSelfAttention(12, 3, 8)(torch.zeros(2, 12), PackedLayout.from_lengths([2])),
        r"`embeddings` must be.*relative_sinusoids",
    ),
    (
        lambda: NAMED.number_of(Prompt("nl", "nl")),
        "language of an utterance must be one of de, en, fr.*'nl'",
    ),
]


@pytest.mark.parametrize(("cls", "options", "message"), CONFIGURATIONS)
def test_messages_of_configurations(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(**options)


@pytest.mark.parametrize(("call", "message"), CALLS, ids=lambda x: x if isinstance(x, str) else "")
def test_messages_of_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_language_model_without_linear_layers_needs_targets():
    pytest.importorskip("transformers")
    model = speech_llm("gpt2")
    with pytest.raises(ValueError, match=r"`lora\.targets` must be given for a language model"):
        adapt(model, LoRAConfig(rank=2))
    adapt(model, LoRAConfig(rank=2, targets=("encoder.layers.*",)))

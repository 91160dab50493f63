"""Searches with a decoder whose experts are named: each utterance keeps its own throughout."""

from dataclasses import replace

import pytest
import torch

from effasr.data.collate import Example
from effasr.data.prompt import Prompt
from effasr.model.asr import ASRModel
from effasr.nn.experts import ExpertsConfig
from tests.decoding.cases import assert_independent_of_batch, decode_all, make_examples

NAMED = ExpertsConfig(count=2, route="language", names=("en", "de"))
SEARCHES: list[dict] = [
    {},
    {"beam": 2, "length_penalty": 2.0},
    {"beam": 4, "length_penalty": 1.0, "ctc_weight": 0.3},
]
IDS = ["greedy", "beam", "joint"]


@pytest.fixture(scope="module")
def dense(model) -> list[ASRModel]:
    """The model, and another one whose decoder has other feed-forward networks."""
    other = ASRModel(model.config, model.vocab_size).eval()
    draw = torch.Generator().manual_seed(1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in state.items():
        if ".mlp." in name:
            value.copy_(torch.randn(value.shape, generator=draw))
    other.load_state_dict(state)
    return [model, other]


@pytest.fixture(scope="module")
def experts(dense) -> ASRModel:
    """The model whose experts are the networks of both."""
    config = dense[0].config
    model = ASRModel(
        replace(config, decoder=replace(config.decoder, experts=NAMED)), dense[0].vocab_size
    ).eval()
    states = [item.state_dict() for item in dense]
    model.load_state_dict(
        {
            name: torch.stack([local[name] for local in states]) if ".mlp." in name else value
            for name, value in states[0].items()
        }
    )
    return model


@pytest.fixture(scope="module")
def examples(tokenizer, noise) -> list[Example]:
    prompts = [tokenizer.prompt(Prompt()), [*tokenizer.prompt(Prompt()), 7]]
    made = make_examples(noise, prompts)
    return [replace(item, expert=(0, 1, 1)[n % 3]) for n, item in enumerate(made)]


@pytest.mark.parametrize("options", SEARCHES, ids=IDS)
def test_an_utterance_is_decoded_by_its_expert(
    options, experts, dense, examples, tokenizer
) -> None:
    plain = [replace(item, expert=None) for item in examples]
    result = assert_independent_of_batch(examples, experts, tokenizer, **options)
    by_expert = [decode_all(plain, model, tokenizer, **options) for model in dense]
    differ = 0
    for number, example in enumerate(examples):
        assert result[number].tokens == by_expert[example.expert][number].tokens
        differ += by_expert[0][number].tokens != by_expert[1][number].tokens
    assert differ > 3, "the test needs experts that matter"


def test_an_utterance_without_an_expert_is_refused(experts, examples, tokenizer) -> None:
    plain = [replace(item, expert=None) for item in examples]
    for options in SEARCHES:
        with pytest.raises(ValueError, match=r"`expert` must be given .* language chooses .*en, d"):
            decode_all(plain, experts, tokenizer, **options)

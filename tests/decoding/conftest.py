import pytest
import torch

from effasr.data.collate import Example
from effasr.data.prompt import Prompt
from effasr.model.asr import ASRModel
from effasr_kernels import PackedSequence, pack
from tests.decoding.cases import FRAMES, make_examples, tiny_asr
from tests.support.recognition import model, noise, tdt_model, tokenizer

__all__ = ["model", "noise", "tdt_model", "tokenizer"]


@pytest.fixture(scope="session")
def examples(tokenizer, noise) -> list[Example]:
    """Seven utterances with two prompts in turn."""
    return make_examples(
        noise, [tokenizer.prompt(Prompt(target, target)) for target in ("en", "de")]
    )


@pytest.fixture(scope="session")
def tiny() -> ASRModel:
    return tiny_asr()


@pytest.fixture(scope="session")
def speech() -> PackedSequence:
    """Encoder output for the tiny model."""
    draw = torch.Generator().manual_seed(0)
    return pack([3 * torch.randn(length, 16, generator=draw) for length in FRAMES])

import pytest

from effasr.data.collate import Example
from effasr.data.prompt import Prompt
from tests.decoding.cases import make_examples
from tests.support.recognition import model, noise, tdt_model, tokenizer

__all__ = ["model", "noise", "tdt_model", "tokenizer"]


@pytest.fixture(scope="session")
def examples(tokenizer, noise) -> list[Example]:
    """Seven utterances with two prompts in turn."""
    return make_examples(
        noise, [tokenizer.prompt(Prompt(target, target)) for target in ("en", "de")]
    )

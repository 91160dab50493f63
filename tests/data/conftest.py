"""Small recordings and manifests for the tests of the data folder."""

import dataclasses

import numpy as np
import pytest

from effasr.data.index.columns import Ragged
from effasr.data.tokenizer import train_tokenizer
from tests.support import corpora

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def _check_same(first, second):
    """Compare two objects of a dataclass field by field, arrays and those in fields as well."""
    for field in dataclasses.fields(first):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=field.name)
            assert a.dtype == b.dtype, field.name
        elif isinstance(a, Ragged):
            np.testing.assert_array_equal(a.values, b.values, err_msg=field.name)
            np.testing.assert_array_equal(a.offsets, b.offsets, err_msg=field.name)
        elif dataclasses.is_dataclass(a):
            _check_same(a, b)
        else:
            assert a == b, field.name


@pytest.fixture(scope="session")
def check_same():
    return _check_same


@pytest.fixture(scope="session")
def write_tone():
    return corpora.write_tone


@pytest.fixture(scope="session")
def write_lines():
    return corpora.write_lines


@pytest.fixture
def nemo(tmp_path):
    """Makes a NeMo manifest of ``count`` tones of 0.5 s and more, in tmp_path/corpus."""

    def make(count=12, **fields):
        folder = tmp_path / "corpus"
        rows = []
        for index in range(count):
            seconds = 0.5 + 0.1 * (index % 7)
            corpora.write_tone(folder / f"audio/u{index}.wav", seconds, hertz=200 + 10 * index)
            text = " ".join(WORDS[(index + step) % 10] for step in range(1 + index % 2))
            audio = f"audio/u{index}.wav"
            rows.append(
                {"audio_filepath": audio, "duration": seconds, "text": text, "lang": "en"} | fields
            )
        return corpora.write_lines(folder / "train.jsonl", rows)

    return make


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Trained on number words; English, and German speech without German text."""
    texts = [" ".join(WORDS[(a + b) % 10] for b in range(4)) for a in range(40)]
    out = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer({"en": texts}, out, vocab_size=40, model_type="bpe", sources=["de"])

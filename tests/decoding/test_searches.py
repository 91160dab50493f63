"""What holds for every search: it does not depend on the batch, and copes with no audio."""

from dataclasses import replace

import pytest
import torch

from effasr.decoding.ctc_greedy import ctc_greedy
from effasr.decoding.decoded import Decoded
from effasr.model.asr import ASRModel
from effasr_kernels import pack
from tests.decoding.cases import (
    GIVEN,
    assert_independent_of_batch,
    batch_of,
    decode_all,
    transducer_model,
)

SEARCHES: dict[str, tuple[str, dict]] = {
    "attention": ("model", {}),
    "attention beam": ("model", {"beam": 4, "length_penalty": 1.2}),
    "joint beam": ("model", {"beam": 4, "ctc_weight": 0.3}),
    "coverage": ("model", {"beam": 3, "coverage_penalty": 30.0, "tokens_per_frame": 1.0}),
    "joint coverage": (
        "model",
        {"beam": 3, "coverage_penalty": 30.0, "tokens_per_frame": 1.0, "ctc_weight": 0.3},
    ),
    "ctc": ("model", {"method": "ctc"}),
    "ctc beam": ("model", {"method": "ctc", "beam": 4}),
    "lstm": ("lstm", {}),
    "lstm beam": ("lstm", {"beam": 3}),
    "stateless": ("stateless", {}),
    "stateless beam": ("stateless", {"beam": 3}),
    "tdt": ("tdt_model", {}),
    "tdt beam": ("tdt_model", {"beam": 3}),
}


@pytest.fixture(scope="module")
def models(model, tdt_model, tokenizer) -> dict[str, ASRModel]:
    transducers = {kind: transducer_model(kind, tokenizer) for kind in ("lstm", "stateless")}
    return {"model": model, "tdt_model": tdt_model, **transducers}


@pytest.mark.parametrize("name", SEARCHES)
def test_results_do_not_depend_on_the_batch(name, models, examples, tokenizer) -> None:
    kind, options = SEARCHES[name]
    together = assert_independent_of_batch(examples, models[kind], tokenizer, **options)
    assert max(len(result.tokens) for result in together) > 5
    if option := next((key for key in ("beam", "coverage_penalty") if key in options), None):
        # What the option changes: a beam is not greedy search.
        plain = {key: value for key, value in options.items() if key not in (option, "ctc_weight")}
        for key in ("length_penalty", "coverage_penalty") if option == "beam" else ():
            plain.pop(key, None)
        assert decode_all(examples, models[kind], tokenizer, **plain) != together


@pytest.mark.parametrize("name", SEARCHES)
def test_no_utterance_and_no_audio(name, models, examples, tokenizer) -> None:
    kind, options = SEARCHES[name]
    model = models[kind]
    assert decode_all([], model, tokenizer, **options) == []
    empty = replace(examples[0], audio=examples[0].audio[:0])
    results = decode_all([examples[0], empty, examples[1]], model, tokenizer, **options)
    assert results[::2] == decode_all(examples[:2], model, tokenizer, **options)
    assert [results[1]] == decode_all([empty], model, tokenizer, **options)
    if not name.startswith(("attention", "joint", "coverage")):
        assert results[1] == Decoded(())


def test_some_texts_end_and_some_are_stopped(examples, model, tokenizer) -> None:
    """Both ways out of the loop are needed for the other tests to mean anything."""
    results = decode_all(examples, model, tokenizer)
    assert {result.truncated for result in results} == {False, True}
    assert all(tokenizer.eos_id not in result.tokens for result in results)


def test_a_text_has_at_most_as_many_tokens_as_its_frames_allow(examples, model, tokenizer) -> None:
    options = {"tokens_per_frame": 0.5, "extra_tokens": 2}
    batch = batch_of(examples, tokenizer)
    results = decode_all(examples, model, tokenizer, **options)
    for result, frames in zip(results, batch.frames.lengths, strict=True):
        assert len(result.tokens) <= frames // 2 + 2
        assert not result.truncated or len(result.tokens) == frames // 2 + 2


def test_a_text_never_outgrows_the_positions_of_the_decoder(examples, model, tokenizer) -> None:
    results = decode_all(examples, model, tokenizer, tokens_per_frame=100.0)
    room = model.config.decoder.max_positions - len(examples[0].prompt)
    assert max(len(result.tokens) for result in results) == room


@pytest.mark.parametrize("rows", [4096, 2])
def test_ctc_merges_repeats_then_drops_blanks(rows, monkeypatch) -> None:
    monkeypatch.setattr("effasr.decoding.ctc_greedy._ROWS", rows)
    blank = 5
    frames = [[5, 1, 1, 5, 1, 2, 2], [2, 2, 3], [], [5, 5], [4], [4]]
    likeliest = [torch.nn.functional.one_hot(torch.tensor(f).long(), 6).float() for f in frames]
    encoded = pack(likeliest, rows=19)
    expected = [[1, 1, 2], [2, 3], [], [], [4], [4]]
    assert ctc_greedy(GIVEN, encoded, blank) == expected

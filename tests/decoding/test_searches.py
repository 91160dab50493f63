"""What holds for every search: it does not depend on the batch, and copes with no audio."""

from dataclasses import replace

import pytest
import torch

from effasr.decoding.decoded import Decoded
from effasr.model.asr import ASRModel
from tests.decoding.cases import assert_independent_of_batch, batch_of, decode_all, transducer_model

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


@pytest.mark.parametrize("name", ["lstm", "lstm beam", "stateless beam", "tdt", "tdt beam"])
def test_half_precision(name, models, examples, tokenizer) -> None:
    kind, options = SEARCHES[name]
    with torch.autocast("cpu", torch.bfloat16):
        results = decode_all(examples, models[kind], tokenizer, **options)
    assert any(result.tokens for result in results)


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("ctc_weight", [0.0, 0.3])
@torch.no_grad()
def test_prompts_may_differ_in_length(ctc_weight, beam, examples, model, tokenizer) -> None:
    from effasr.decoding.attention_beam import attention_beam
    from effasr.decoding.continuous_batching.engine import attention_greedy

    def search(encoded, prompts, limits):
        if beam == 1 and not ctc_weight:
            return attention_greedy(model, encoded, prompts, limits, tokenizer.eos_id)
        options = {"beam": beam, "ctc_weight": ctc_weight}
        return attention_beam(model, encoded, prompts, limits, tokenizer.eos_id, **options)

    prompts, limits = [[2], examples[1].prompt, [2, 7, 3, 7, 5, 9, 9, 9]], [20, 12, 16]
    together = search(model.encode(batch_of(examples[:3], tokenizer)), prompts, limits)
    for n, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        encoded = model.encode(batch_of([examples[n]], tokenizer))
        assert search(encoded, [prompt], [limit]) == [together[n]]


def test_results_keep_no_graph(examples, model, tokenizer) -> None:
    seen = []
    hook = model.encoder.register_forward_hook(lambda _, __, out: seen.append(out))
    decode_all(examples[:1], model, tokenizer)
    hook.remove()
    assert not seen[0].values.requires_grad

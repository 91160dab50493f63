import pytest
import torch

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.decoding.ctc_greedy import ctc_greedy
from effasr.decoding.greedy import Decoded, attention_greedy, choose_method, decode
from effasr.model.asr import ASRModel, ModelConfig
from effasr_kernels import PackedSequence, pack

SECONDS = (0.3, 2.1, 0.7, 3.3, 1.2, 0.08, 2.6)


@pytest.fixture(scope="module")
def examples(tokenizer, noise) -> list[Example]:
    prompts = [tokenizer.prompt(Prompt(target, target)) for target in ("en", "de")]
    return [
        Example(str(n), noise(seconds, seed=n), prompts[n % 2], [], monotonic=False)
        for n, seconds in enumerate(SECONDS)
    ]


def _batch(examples: list[Example], tokenizer, shape: StaticShape | None = None) -> Batch:
    return collate(examples, shape, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)


def _decode(examples, model, tokenizer, shape=None, **options) -> list[Decoded]:
    prompts = [example.prompt for example in examples]
    config = DecodingConfig(**options)
    return decode(model, tokenizer, _batch(examples, tokenizer, shape), prompts, config)


@pytest.mark.parametrize("method", ["attention", "ctc"])
def test_an_utterance_gives_the_same_tokens_in_any_company(
    method, examples, model, tokenizer
) -> None:
    together = _decode(examples, model, tokenizer, method=method)
    assert len({result.tokens for result in together}) > 4, "the test needs different texts"
    alone = [_decode([example], model, tokenizer, method=method)[0] for example in examples]
    assert alone == together
    for first, second in [(0, 3), (3, 0), (5, 1), (6, 2)]:
        pair = _decode([examples[first], examples[second]], model, tokenizer, method=method)
        assert pair == [together[first], together[second]]
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(1)).tolist()
    permuted = _decode([examples[n] for n in order], model, tokenizer, method=method)
    assert permuted == [together[n] for n in order]


@pytest.mark.parametrize("method", ["attention", "ctc"])
def test_the_tail_of_a_static_shape_changes_nothing(method, examples, model, tokenizer) -> None:
    shape = StaticShape(frame_budget=400, token_budget=80, max_sequences=11)
    tailed = _decode(examples, model, tokenizer, shape, method=method)
    assert tailed == _decode(examples, model, tokenizer, method=method)


def test_some_texts_end_and_some_are_stopped(examples, model, tokenizer) -> None:
    """Both ways out of the loop are needed for the other tests to mean anything."""
    results = _decode(examples, model, tokenizer)
    assert {result.truncated for result in results} == {False, True}
    assert all(tokenizer.eos_id not in result.tokens for result in results)


def _uncached(
    example: Example, model: ASRModel, tokenizer, limit: int
) -> tuple[Decoded, list[torch.Tensor]]:
    """Greedy search which runs the decoder over the whole text at every step."""
    encoded = model.encode(_batch([example], tokenizer))
    tokens, logits = list(example.prompt), []
    while True:
        hidden, _ = model.decode(pack([torch.tensor(tokens)]), encoded)
        logits.append(model.logits(hidden[-1]))
        token = int(logits[-1].argmax())
        if token == tokenizer.eos_id:
            return Decoded(tuple(tokens[len(example.prompt) :])), logits
        tokens.append(token)
        if len(tokens) == len(example.prompt) + limit:
            return Decoded(tuple(tokens[len(example.prompt) :]), truncated=True), logits


@torch.no_grad()
def test_caches_change_nothing(examples, model, tokenizer) -> None:
    config = DecodingConfig()
    cached = _decode(examples, model, tokenizer)
    for n, example in enumerate(examples):
        batch = _batch([example], tokenizer)
        frames = batch.frames.lengths[0]
        limit = min(config.max_tokens(frames), 64 - len(example.prompt))
        expected, expected_logits = _uncached(example, model, tokenizer, limit)
        assert cached[n] == expected
        state = model.start_decoding(model.encode(batch), 64)
        for token in example.prompt[:-1]:
            model.decode_step(torch.tensor([token]), state)
        read = [example.prompt[-1], *expected.tokens]
        for token, logits in zip(read, expected_logits, strict=False):
            step = model.logits(model.decode_step(torch.tensor([token]), state))[0]
            torch.testing.assert_close(step, logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_prompts_may_differ_in_length(examples, model, tokenizer) -> None:
    encoded = model.encode(_batch(examples[:3], tokenizer))
    prompts = [[2], examples[1].prompt, [2, 7, 3, 7, 5, 9, 9, 9]]
    together = attention_greedy(model, encoded, prompts, [20, 20, 20], tokenizer.eos_id)
    for n, prompt in enumerate(prompts):
        one = model.encode(_batch([examples[n]], tokenizer))
        assert attention_greedy(model, one, [prompt], [20], tokenizer.eos_id) == [together[n]]


def test_a_text_has_at_most_as_many_tokens_as_its_frames_allow(examples, model, tokenizer) -> None:
    options = {"tokens_per_frame": 0.5, "extra_tokens": 2}
    batch = _batch(examples, tokenizer)
    results = _decode(examples, model, tokenizer, **options)
    for result, frames in zip(results, batch.frames.lengths, strict=True):
        assert len(result.tokens) <= frames // 2 + 2
        assert not result.truncated or len(result.tokens) == frames // 2 + 2


def test_a_text_never_outgrows_the_positions_of_the_decoder(examples, model, tokenizer) -> None:
    results = _decode(examples, model, tokenizer, tokens_per_frame=100.0)
    room = model.config.decoder.max_positions - len(examples[0].prompt)
    assert max(len(result.tokens) for result in results) == room


def test_nothing_to_decode(model, tokenizer) -> None:
    assert _decode([], model, tokenizer) == []
    assert _decode([], model, tokenizer, method="ctc") == []


def test_an_utterance_without_audio_is_no_accident(examples, model, tokenizer) -> None:
    empty = Example("empty", examples[0].audio[:0], examples[0].prompt, [], monotonic=False)
    for method in ("attention", "ctc"):
        results = _decode([examples[0], empty, examples[1]], model, tokenizer, method=method)
        assert results[::2] == _decode(examples[:2], model, tokenizer, method=method)
    assert results[1] == Decoded(())


class _Scripted:
    """A CTC head whose likeliest symbols are given."""

    def ctc_logits(self, encoded: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(encoded[:, 0].long(), 6).float()


@pytest.mark.parametrize("rows", [4096, 2])
def test_ctc_merges_repeats_then_drops_blanks(rows, monkeypatch) -> None:
    monkeypatch.setattr("effasr.decoding.ctc_greedy._ROWS", rows)
    blank = 5
    frames = [[5, 1, 1, 5, 1, 2, 2], [2, 2, 3], [], [5, 5], [4], [4]]
    encoded = pack([torch.tensor(f, dtype=torch.float32).reshape(-1, 1) for f in frames], rows=19)
    expected = [[1, 1, 2], [2, 3], [], [], [4], [4]]
    assert ctc_greedy(_Scripted(), encoded, blank) == expected  # type: ignore[arg-type]


def test_the_method_follows_from_the_model(model, tokenizer) -> None:
    assert choose_method(model, "auto") == "attention"
    assert choose_method(model, "ctc") == "ctc"
    config = ModelConfig(
        features=model.config.features, encoder=model.config.encoder, decoder=None, ctc=True
    )
    only_ctc = ASRModel(config, tokenizer.vocab_size)
    assert choose_method(only_ctc, "auto") == "ctc"
    with pytest.raises(ValueError, match="must not be attention, because this model has no dec"):
        choose_method(only_ctc, "attention")


def test_ctc_is_refused_without_its_head(model, tokenizer) -> None:
    config = ModelConfig(
        features=model.config.features,
        encoder=model.config.encoder,
        decoder=model.config.decoder,
    )
    with pytest.raises(ValueError, match="no CTC head"):
        choose_method(ASRModel(config, tokenizer.vocab_size), "ctc")


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ([[2]], "must be 2, one per utterance, but are 1"),
        ([[2], []], "must not be empty"),
        ([[2], [3] * 64], "shorter than the decoder's 64 positions, but one has 64"),
    ],
)
def test_prompts_that_cannot_be_are_refused(prompts, match, examples, model, tokenizer) -> None:
    batch = _batch(examples[:2], tokenizer)
    with pytest.raises(ValueError, match=match):
        decode(model, tokenizer, batch, prompts)


def test_results_keep_no_graph(examples, model, tokenizer) -> None:
    seen = []
    hook = model.encoder.register_forward_hook(lambda _, __, out: seen.append(out))
    _decode(examples[:1], model, tokenizer)
    hook.remove()
    assert isinstance(seen[0], PackedSequence)
    assert not seen[0].values.requires_grad


@pytest.mark.parametrize(
    "options",
    [
        {"frame_budget": 0},
        {"max_sequences": 0},
        {"extra_tokens": 0},
        {"workers": 0},
        {"chunk_seconds": 0.9},
        {"chunk_seconds": 5.0, "search_seconds": 2.6},
        {"tokens_per_frame": -0.1},
        {"tokens_per_frame": float("nan")},
    ],
)
def test_a_senseless_configuration_is_refused(options) -> None:
    name = list(options)[-1]
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        DecodingConfig(**options)

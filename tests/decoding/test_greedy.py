import pytest
import torch

from effasr.data.batch import StaticShape
from effasr.data.collate import Example
from effasr.data.prompt import Prompt
from effasr.decoding.checks import choose_method
from effasr.decoding.config import DecodingConfig
from effasr.decoding.continuous_batching.engine import attention_greedy
from effasr.decoding.ctc_greedy import ctc_greedy
from effasr.decoding.decode import decode
from effasr.decoding.decoded import Decoded
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr_kernels import PackedSequence, pack
from tests.decoding.cases import batch_of, decode_all, make_examples


@pytest.fixture(scope="module")
def examples(tokenizer, noise) -> list[Example]:
    prompts = [tokenizer.prompt(Prompt(target, target)) for target in ("en", "de")]
    return make_examples(noise, prompts)


@pytest.mark.parametrize("method", ["attention", "ctc"])
def test_an_utterance_gives_the_same_tokens_in_any_company(
    method, examples, model, tokenizer
) -> None:
    together = decode_all(examples, model, tokenizer, method=method)
    assert len({result.tokens for result in together}) > 4, "the test needs different texts"
    alone = [decode_all([example], model, tokenizer, method=method)[0] for example in examples]
    assert alone == together
    for first, second in [(0, 3), (3, 0), (5, 1), (6, 2)]:
        pair = decode_all([examples[first], examples[second]], model, tokenizer, method=method)
        assert pair == [together[first], together[second]]
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(1)).tolist()
    permuted = decode_all([examples[n] for n in order], model, tokenizer, method=method)
    assert permuted == [together[n] for n in order]


@pytest.mark.parametrize("method", ["attention", "ctc"])
def test_the_tail_of_a_static_shape_changes_nothing(method, examples, model, tokenizer) -> None:
    shape = StaticShape(frame_budget=400, token_budget=80, max_sequences=11)
    tailed = decode_all(examples, model, tokenizer, shape, method=method)
    assert tailed == decode_all(examples, model, tokenizer, method=method)


def test_some_texts_end_and_some_are_stopped(examples, model, tokenizer) -> None:
    """Both ways out of the loop are needed for the other tests to mean anything."""
    results = decode_all(examples, model, tokenizer)
    assert {result.truncated for result in results} == {False, True}
    assert all(tokenizer.eos_id not in result.tokens for result in results)


def _uncached(
    example: Example, model: ASRModel, tokenizer, limit: int
) -> tuple[Decoded, list[torch.Tensor]]:
    """Greedy search which runs the decoder over the whole text at every step."""
    encoded = model.encode(batch_of([example], tokenizer))
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
    cached = decode_all(examples, model, tokenizer)
    for n, example in enumerate(examples):
        batch = batch_of([example], tokenizer)
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
    encoded = model.encode(batch_of(examples[:3], tokenizer))
    prompts = [[2], examples[1].prompt, [2, 7, 3, 7, 5, 9, 9, 9]]
    together = attention_greedy(model, encoded, prompts, [20, 20, 20], tokenizer.eos_id)
    for n, prompt in enumerate(prompts):
        one = model.encode(batch_of([examples[n]], tokenizer))
        assert attention_greedy(model, one, [prompt], [20], tokenizer.eos_id) == [together[n]]


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


def test_nothing_todecode_all(model, tokenizer) -> None:
    assert decode_all([], model, tokenizer) == []
    assert decode_all([], model, tokenizer, method="ctc") == []


def test_an_utterance_without_audio_is_no_accident(examples, model, tokenizer) -> None:
    empty = Example("empty", examples[0].audio[:0], examples[0].prompt, [], monotonic=False)
    for method in ("attention", "ctc"):
        results = decode_all([examples[0], empty, examples[1]], model, tokenizer, method=method)
        assert results[::2] == decode_all(examples[:2], model, tokenizer, method=method)
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
    batch = batch_of(examples[:2], tokenizer)
    with pytest.raises(ValueError, match=match):
        decode(model, tokenizer, batch, prompts)


def test_results_keep_no_graph(examples, model, tokenizer) -> None:
    seen = []
    hook = model.encoder.register_forward_hook(lambda _, __, out: seen.append(out))
    decode_all(examples[:1], model, tokenizer)
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

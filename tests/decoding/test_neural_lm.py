"""Shallow fusion of causal language models of transformers."""

import gc
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from effasr.data.collate import Example, collate
from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decode import decode
from effasr.decoding.lm import neural
from effasr.decoding.lm.loading import load_lm
from effasr.decoding.lm.neural import NeuralLM, load_neural_lm

transformers = pytest.importorskip("transformers")

V, EOS = 12, 3
CONTEXTS = [[[-1, -1, -1], [-1, 4, 5]], [[7, 4, 5], [-1, 4, 5]]]

LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
KINDS = {
    "gpt2": ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "llama": ("Llama", LLAMA | {"num_attention_heads": 2, "num_key_value_heads": 1}),
    # Looks back a few tokens only, in one of two layers.
    "gemma": (
        "Gemma2",
        LLAMA | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
                 "sliding_window": 4, "query_pre_attn_scalar": 8},
    ),
    "mistral": (
        "Mistral", LLAMA | {"num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": 3}
    ),
    # Without keys and values, and with no way to go on.
    "mamba": ("Mamba", {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}),
    "gpt1": ("OpenAIGPT", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}),
}  # fmt: skip


def causal(kind: str, vocab_size: int = V, **options):
    """A random model whose next token depends on what was said, strongly."""
    torch.manual_seed(0)
    name, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=vocab_size, bos_token_id=0, eos_token_id=EOS, pad_token_id=None,
        **sizes | options,
    )  # fmt: skip
    classes = (f"{name}ForCausalLM", f"{name}LMHeadModel")
    (made,) = (getattr(transformers, item) for item in classes if hasattr(transformers, item))
    model = made(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.7)
    return model.eval()


def alone(model, context) -> torch.Tensor:
    """What the model itself says behind one context: log-probabilities, float64 (V,)."""
    ids = torch.tensor([[0, *(token for token in context if token >= 0)]])
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0, -1].double().log_softmax(-1)


def searched(steps: int, utterances: int = 3, beam: int = 3) -> Iterator[torch.Tensor]:
    """Contexts as a beam asks for them: of any hypothesis before, and fewer utterances."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.empty(utterances, beam, 0, dtype=torch.int64)
    for step in range(steps):
        yield labels
        parents = torch.randint(beam, (len(labels), beam), generator=draw)
        message = torch.randint(V, (len(labels), beam, 1), generator=draw)
        # Some read a prompt, or stay as they are.
        message[torch.rand(message.shape, generator=draw) < 0.1] = -1
        rows = torch.arange(len(labels))[:, None]
        labels = torch.cat([labels[rows, parents], message], -1)
        if step in (steps // 3, steps // 2):
            labels = labels[1:]


def check(lm: NeuralLM, model, contexts: torch.Tensor) -> None:
    """The language model says what the model itself says, token for token."""
    symbols = torch.arange(V).expand(*contexts.shape[:2], V)
    expected = [[alone(model, context) for context in row] for row in contexts.tolist()]
    result = lm.scores(contexts, symbols)[..., :-1]
    assert result == pytest.approx(torch.stack([torch.stack(row) for row in expected]), abs=1e-4)


@pytest.fixture
def folder(tmp_path) -> Path:
    transformers.utils.logging.disable_progress_bar()
    causal("gpt2").save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_scores_are_the_models_own(kind) -> None:
    lm, contexts = NeuralLM(causal(kind), V, EOS), torch.tensor(CONTEXTS)
    check(lm, causal(kind), contexts)
    symbols = torch.randint(V, (2, 2, 5), generator=torch.Generator().manual_seed(1))
    result = lm.scores(contexts, symbols)
    every = lm.scores(contexts, torch.arange(V).expand(2, 2, V))
    assert result.dtype == torch.float64
    assert torch.equal(result[..., :-1], every.gather(2, symbols))
    assert torch.equal(result[..., -1], every[..., EOS])
    # What is remembered is the same, and memory is bounded.
    assert torch.equal(lm.scores(contexts, symbols), result)
    lm._most = 1
    assert torch.equal(lm.scores(contexts, symbols), result)
    assert len(lm._scores) == 3


def read_by(model) -> list[torch.Size]:
    """The shapes of what the model reads from here on: (texts, tokens)."""
    shapes = []
    model.register_forward_pre_hook(
        lambda _, __, options: shapes.append(options["input_ids"].shape), with_kwargs=True
    )
    return shapes


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma", "mistral"])
def test_a_beam_costs_the_last_token_of_each_hypothesis(kind) -> None:
    """Whichever of them are kept, repeated or given up, and whichever utterances are done."""
    model, reference = causal(kind), causal(kind)
    lm = NeuralLM(model, V, EOS)
    shapes, seen = read_by(model), set()
    for contexts in searched(24):
        del shapes[:]
        check(lm, reference, contexts)
        new = {tuple(t for t in row if t >= 0) for row in contexts.flatten(0, 1).tolist()} - seen
        assert sum(texts for texts, _ in shapes) == len(new)
        assert all(tokens == 1 for _, tokens in shapes)
        seen |= new


@pytest.mark.parametrize("room", [0, 1, 30])
def test_what_has_no_room_is_read_again(room, monkeypatch) -> None:
    model, reference = causal("llama"), causal("llama")
    # Two layers of keys and values of one head of 8, in float32.
    monkeypatch.setattr(neural, "_STATE_BYTES", room * 2 * 2 * 8 * 4)
    monkeypatch.setattr(neural, "_PASS_BYTES", 2 * 2 * 2 * 8 * 4 * 20)
    lm = NeuralLM(model, V, EOS)
    shapes = read_by(model)
    for contexts in searched(24):
        check(lm, reference, contexts)
        assert lm._cache is not None
        assert len(lm._cache) <= len(lm._cache._rows) <= room
    assert any(tokens > 1 for _, tokens in shapes)
    # Of long texts two at a time.
    assert all(texts * tokens <= 2 * 24 for texts, tokens in shapes if tokens > 14)


@pytest.mark.parametrize("kind", ["mamba", "gpt1"])
def test_a_model_that_cannot_go_on_reads_each_text_again(kind, caplog) -> None:
    with caplog.at_level(logging.WARNING, "effasr"):
        lm = NeuralLM(causal(kind), V, EOS)
    assert "does not go on from the keys and values of a text" in caplog.text
    reference = causal(kind)
    for contexts in searched(6):
        check(lm, reference, contexts)


def test_long_texts_are_cut_to_what_the_model_reads() -> None:
    lm = NeuralLM(causal("gpt2"), V, EOS)
    assert lm.order == 64
    scores = lm.scores(torch.full((1, 1, 100), 4), torch.tensor([[[5]]]))
    assert torch.isfinite(scores).all()
    reference, text = causal("gpt2"), torch.arange(80) % V
    for length in range(60, 70):
        context = text[:length][None, None]
        check(lm, reference, context[..., -63:] if length > 63 else context)
        requested = torch.arange(V)[None, None]
        assert torch.equal(lm.scores(context, requested), lm.scores(context[..., -63:], requested))


@pytest.mark.parametrize("method", ["attention", "ctc"])
def test_it_takes_part_in_the_beam(method, model, tokenizer, noise, tmp_path) -> None:
    transformers.utils.logging.disable_progress_bar()
    causal("gpt2", model.vocab_size).save_pretrained(tmp_path / "lm")
    prompt = tokenizer.prompt(Prompt())
    examples = [Example(str(n), noise(1.0 + n, n), prompt, [], monotonic=True) for n in range(3)]
    batch = collate(examples, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)
    texts = {}
    for weight in (None, 1e-9, 2.0):
        config = DecodingConfig(
            method=method, beam=3, lm=None if weight is None else tmp_path / "lm", lm_weight=weight
        )
        assert load_lm(config, model, tokenizer) is None or weight is not None
        texts[weight] = [
            item.tokens for item in decode(model, tokenizer, batch, [prompt] * 3, config)
        ]
    assert texts[None] == texts[1e-9]
    assert texts[2.0] != texts[None]
    # As where each text is read again.
    lm = load_neural_lm(tmp_path / "lm", model.vocab_size, tokenizer.eos_id)
    assert lm._cache is not None
    lm._cache = None
    again = decode(model, tokenizer, batch, [prompt] * 3, config, lm=lm)
    assert [item.tokens for item in again] == texts[2.0]


def test_refusals(folder, tmp_path) -> None:
    load_neural_lm(folder, V, EOS)
    with pytest.raises(ValueError, match="must have the speech model's vocabulary of 40 tokens"):
        load_neural_lm(folder, 40, EOS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="must be a folder of a causal language model"):
        load_neural_lm(tmp_path / "empty", V, EOS)
    # As tests/interop/test_language_model.py reads them; here it is one sentence for all.
    sizes = json.loads((folder / "config.json").read_text()) | {"n_embd": 1 << 20}
    texts = {"{": "not valid JSON", json.dumps(sizes): "the sizes of the weights"}
    for text, reason in (texts | {'{"model_type": "bart"}': "but is 'bart'"}).items():
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=f"of a causal language model, .*{reason}"):
            load_neural_lm(folder, V, EOS)
    without = causal("gpt2")
    without.config.bos_token_id = without.config.eos_token_id = None
    with pytest.raises(ValueError, match="must have a `bos_token_id` or an `eos_token_id`"):
        NeuralLM(without, V, EOS)
    gc.collect()

"""Shallow fusion of causal language models of transformers."""

import gc
from pathlib import Path

import pytest
import torch

from effasr.data.batch import Example, collate
from effasr.data.prompt import Prompt
from effasr.inference.decoding_config import DecodingConfig
from effasr.inference.greedy import decode, load_lm
from effasr.inference.neural_lm import NeuralLM, load_neural_lm

transformers = pytest.importorskip("transformers")

V, EOS = 12, 3


def causal(kind: str, vocab_size: int = V, **options):
    """A random model whose next token depends on what was said, strongly."""
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=vocab_size, n_embd=16, n_layer=2, n_head=2, n_positions=64,
            bos_token_id=0, eos_token_id=EOS, **options,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, bos_token_id=0, eos_token_id=EOS, **options,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.7)
    return model.eval()


@pytest.fixture
def folder(tmp_path) -> Path:
    transformers.utils.logging.disable_progress_bar()
    causal("gpt2").save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_scores_are_the_models_own(kind: str) -> None:
    model = causal(kind)
    lm = NeuralLM(model, V, EOS)
    contexts = torch.tensor([[[-1, -1, -1], [-1, 4, 5]], [[7, 4, 5], [-1, 4, 5]]])
    symbols = torch.randint(V, (2, 2, 5), generator=torch.Generator().manual_seed(1))
    found = lm.scores(contexts, symbols)
    assert found.shape == (2, 2, 6)
    assert found.dtype == torch.float64
    for n, row in enumerate(contexts.tolist()):
        for k, context in enumerate(row):
            ids = torch.tensor([[0, *(token for token in context if token >= 0)]])
            with torch.no_grad():
                expected = model(input_ids=ids).logits[0, -1].log_softmax(-1)
            asked = [*symbols[n, k].tolist(), EOS]
            assert found[n, k] == pytest.approx(expected[asked].double(), abs=1e-5)
    # What is remembered is the same, and memory is bounded.
    assert torch.equal(lm.scores(contexts, symbols), found)
    lm._most = 1
    assert torch.equal(lm.scores(contexts, symbols), found)
    assert len(lm._known) == 3


def test_a_whole_text_has_the_probability_that_the_model_gives_it() -> None:
    model = causal("gpt2")
    lm, text = NeuralLM(model, V, EOS), [4, 7, 7, 9]
    total = 0.0
    for place, token in enumerate([*text, EOS]):
        given = torch.tensor([[[-1] * (len(text) - place) + text[:place]]])
        if token == EOS:
            total += float(lm.scores(given, torch.zeros(1, 1, 0, dtype=torch.int64))[0, 0, -1])
        else:
            total += float(lm.scores(given, torch.tensor([[[token]]]))[0, 0, 0])
    ids = torch.tensor([[0, *text, EOS]])
    with torch.no_grad():
        # transformers' loss is the mean over the predicted tokens.
        expected = -float(model(input_ids=ids, labels=ids).loss) * (len(text) + 1)
    assert total == pytest.approx(expected, rel=1e-4)


def test_long_texts_are_cut_to_what_the_model_reads() -> None:
    lm = NeuralLM(causal("gpt2"), V, EOS)
    assert lm.order == 64
    scores = lm.scores(torch.full((1, 1, 100), 4), torch.tensor([[[5]]]))
    assert torch.isfinite(scores).all()


@pytest.mark.parametrize("method", ["attention", "ctc"])
def test_it_takes_part_in_the_beam(method: str, model, tokenizer, noise, tmp_path) -> None:
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
            one.tokens for one in decode(model, tokenizer, batch, [prompt] * 3, config)
        ]
    assert texts[None] == texts[1e-9]
    assert texts[2.0] != texts[None]


def test_refusals(folder: Path, tmp_path) -> None:
    load_neural_lm(folder, V, EOS)
    with pytest.raises(ValueError, match="must have the speech model's vocabulary of 40 tokens"):
        load_neural_lm(folder, 40, EOS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="must be a folder of a causal language model"):
        load_neural_lm(tmp_path / "empty", V, EOS)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="must be a folder of a causal language model"):
        load_neural_lm(folder, V, EOS)
    without = causal("gpt2")
    without.config.bos_token_id = without.config.eos_token_id = None
    with pytest.raises(ValueError, match="must have a `bos_token_id` or an `eos_token_id`"):
        NeuralLM(without, V, EOS)
    gc.collect()

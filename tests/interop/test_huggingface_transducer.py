"""transformers' Parakeet transducers, with random weights, are the oracle of ours."""

import dataclasses
import logging

import pytest
import torch
from torch import Tensor

from effasr.decoding.tdt_beam import tdt_beam
from effasr.decoding.transducer_beam import transducer_beam
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.interop.huggingface.checkpoint import export_model, import_model
from effasr.interop.huggingface.files import SpecialTokens
from effasr.interop.huggingface.parakeet import PARAKEET_TRANSDUCER
from effasr.model.asr import ASRModel
from effasr.model.decoder import DecoderConfig
from effasr.model.transducer import TransducerConfig
from tests.interop.parakeet import (
    BINS,
    ENCODER,
    VOCABULARY,
    assert_export_inverts_import,
    assert_same,
    assert_same_gradients,
    copy_with,
    features_of,
    saved,
    transformers,
)

DURATIONS = (0, 1, 2, 3)
TRANSDUCER = {
    "encoder_config": ENCODER,
    "vocab_size": VOCABULARY + 1,
    "blank_token_id": VOCABULARY,
    "decoder_hidden_size": 24,
    "num_decoder_layers": 2,
}
CLASSES = {"rnnt": "ParakeetForRNNT", "tdt": "ParakeetForTDT"}


@torch.no_grad()
def random_model(kind, **options):
    """No bias is zero and no norm at rest; symbols depend on frames and on labels so far.

    Every symbol is as likely as the others on the whole, but blanks are likelier, and no duration
    less so, else a TDT would not go on: transformers does not bound the labels of a frame.
    """
    torch.manual_seed(0)
    if kind == "rnnt":
        config = transformers.ParakeetRNNTConfig(**TRANSDUCER, **options)
    else:
        config = transformers.ParakeetTDTConfig(**TRANSDUCER, **{"durations": DURATIONS, **options})
    model = getattr(transformers, CLASSES[kind])(config)
    for name, parameter in model.named_parameters():
        parameter.add_((0.3 if name.startswith("encoder.") else 0.6) * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0.0, 0.3)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0)
    model.eval()
    labels = torch.randint(VOCABULARY, (1, 8))
    logits = model(torch.randn(1, 90, BINS), decoder_input_ids=labels).logits
    logits = logits.flatten(0, -2)
    head = model.joint.head.bias
    head -= logits.mean(0)
    head[VOCABULARY] += 2 * logits.std(0).mean()
    head[VOCABULARY + 1 : VOCABULARY + 2] -= 2 * logits.std(0).mean()
    model.generation_config.decoder_start_token_id = VOCABULARY
    if kind == "tdt":
        rows = range(VOCABULARY + 1, VOCABULARY + 1 + len(DURATIONS))
        model.generation_config.suppress_tokens = list(rows)
    return model


@pytest.fixture(scope="module", params=CLASSES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def theirs(kind):
    return random_model(kind)


@pytest.fixture(scope="module")
def directory(theirs, tmp_path_factory):
    return saved(theirs, tmp_path_factory.mktemp("parakeet"))


@pytest.fixture
def ours(directory):
    return ASRModel.from_state_dict(*import_model(directory)).eval()


def head_of(model):
    return model.transducer


def their_inputs(example):
    tokens = torch.tensor([[VOCABULARY, *example.text]])
    return {**features_of(example), "decoder_input_ids": tokens}


def valid(model, inputs):
    """Encoder frames of one utterance: the features have rows more, which are masked."""
    return int(model._get_output_attention_mask(inputs["attention_mask"]).sum())


def plain_loss(logits, labels):
    """The forward recursion of an RNN-T over logits (T, U + 1, V + 1), differentiable.

    transformers leaves this to torchaudio.
    """
    scores = logits.double().log_softmax(-1)
    frames = len(scores)
    alpha: list[list[Tensor]] = []
    for t in range(frames):
        row: list[Tensor] = []
        for u in range(len(labels) + 1):
            ways = [alpha[t - 1][u] + scores[t - 1, u, VOCABULARY]] if t else []
            if u:
                ways.append(row[u - 1] + scores[t, u - 1, labels[u - 1]])
            row.append(torch.stack(ways).logsumexp(0) if ways else scores.new_zeros(()))
        alpha.append(row)
    return -(alpha[-1][-1] + scores[-1, -1, VOCABULARY])


def their_loss(model, example):
    """The negative log-likelihood of an utterance."""
    inputs = their_inputs(example)
    if "durations" not in model.config.to_dict():
        return plain_loss(model(**inputs).logits[0, : valid(model, inputs)], example.text)
    # transformers divides by the number of labels.
    loss = model(**inputs, labels=torch.tensor([example.text])).loss
    return loss * len(example.text)


def their_transcripts(model, *examples):
    """Of `generate`, without blanks and what follows the last frame of a shorter utterance."""
    features = features_of(*examples)
    found = model.generate(**features, max_new_tokens=400)
    mask = model.get_audio_features(**features).attention_mask
    frames = found.durations.cumsum(1) - found.durations
    kept = (found.sequences != VOCABULARY) & (frames < mask.sum(1, keepdim=True))
    return [row[keep].tolist() for row, keep in zip(found.sequences, kept, strict=True)]


@torch.no_grad()
def test_encoder_predictor_and_joint_are_the_same(theirs, ours, examples, make_batch):
    head = head_of(ours)
    for example in examples:
        inputs = their_inputs(example)
        expected, frames = theirs(**inputs), valid(theirs, inputs)
        batch = make_batch([example])
        encoded = ours.encode(batch)
        states, projected = expected.last_hidden_state[0], expected.pooler_output[0]
        assert_same(encoded.values, states[:frames], f"encoder of {example.id}")
        mine = head.encoder_projection(encoded.values)
        assert_same(mine, projected[:frames], f"projected encoder of {example.id}")
        hidden = head.predictor(batch.text.values, batch.text.layout)
        predicted = head.predictor_projection(hidden)
        if example.monotonic:
            decoded = theirs.decoder(inputs["decoder_input_ids"])
            assert_same(predicted, decoded[0], f"predictor of {example.id}")
            # Every frame with every number of labels.
            logits = head.logits(mine[:, None], predicted)
            assert_same(logits, expected.logits[0, :frames], f"joint of {example.id}")


def test_a_packed_batch_gives_the_same_loss_and_every_gradient(theirs, ours, examples, make_batch):
    theirs.zero_grad()
    counted = [example for example in examples if example.monotonic]
    expected = torch.stack([their_loss(theirs, example) for example in counted])
    expected.sum().backward()
    losses = ours(make_batch(examples, static=True))
    losses.transducer.backward()
    each = [ours(make_batch([example])).transducer for example in counted]
    assert_same(torch.stack(each).double(), expected.double(), "each loss")
    assert_same(losses.transducer.double(), expected.sum().double(), "loss")
    # That of a key's bias is only rounding errors, as it adds a constant to a row of scores.
    assert_same_gradients(ours, theirs, PARAKEET_TRANSDUCER, least=1e-2)


@torch.no_grad()
def test_greedy_transcripts_are_those_of_generate(theirs, ours, examples, make_batch):
    encoded = ours.encode(make_batch(examples))
    found = transducer_greedy(head_of(ours), encoded, max_symbols=10)
    assert found == their_transcripts(theirs, *examples)
    assert found == [their_transcripts(theirs, example)[0] for example in examples]
    assert len({label for transcript in found for label in transcript}) > 3
    assert len(found[0]) < 10 * encoded.layout.lengths[0], "no blank was said"


@torch.no_grad()
def test_scores_of_a_list_are_their_losses(theirs, ours, examples, make_batch):
    """With room for all transcripts of one label at all frames ahead, a beam drops no path."""
    head, encoded = head_of(ours), ours.encode(make_batch(examples))
    search = transducer_beam if head.config.durations is None else tdt_beam
    beam = (VOCABULARY + 1) * (1 + max(DURATIONS))
    found = search(head, encoded, beam, [1] * len(examples), 3)
    compared = 0
    for example, listed in zip(examples, found, strict=True):
        assert len(listed) == 3
        # transformers' loss of TDT takes labels that are its padding for none.
        for one in listed:
            if not one.tokens or one.tokens[0] == theirs.config.pad_token_id:
                continue
            compared += 1
            loss = their_loss(theirs, dataclasses.replace(example, text=list(one.tokens)))
            assert one.score == pytest.approx(-float(loss), abs=1e-4)
    assert compared >= 2 * len(examples)


def test_export_is_the_inverse_of_import(ours, kind, tmp_path):
    assert_export_inverts_import(ours, tmp_path, export_model)
    assert export_model(ours, tmp_path) == CLASSES[kind]


def test_transformers_loads_what_is_exported(theirs, kind, ours, tmp_path, examples):
    export_model(ours, tmp_path)
    loader = getattr(transformers, CLASSES[kind])
    again, report = loader.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    expected = theirs.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, value in again.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert again.config.blank_token_id == VOCABULARY
    # Without any setting: the start symbol, and the rows that are no tokens, are in the files.
    assert their_transcripts(again, *examples) == their_transcripts(theirs, *examples)


def test_a_trained_configuration_goes_out_and_comes_back(
    tmp_path, caplog, tiny_config, examples, make_batch
):
    """A hybrid with options of training, tanh, and durations that are not their own places."""
    transducer = TransducerConfig(
        width=12, joint=12, activation="tanh", fastemit=0.1, dropout=0.2, durations=(0, 1, 2, 4),
        sigma=0.05,
    )  # fmt: skip
    config = dataclasses.replace(tiny_config, decoder=None, transducer=transducer)
    torch.manual_seed(0)
    model = ASRModel(config, VOCABULARY).eval()
    with caplog.at_level(logging.WARNING):
        assert export_model(model, tmp_path, SpecialTokens(pad_id=5)) == "ParakeetForTDT"
    assert "The CTC head is not exported" in caplog.text
    assert (
        "transducer.dropout = 0.2, transducer.fastemit = 0.1, transducer.sigma = 0.05"
        in caplog.text
    )
    assert "skip the wrong numbers of frames" in caplog.text
    imported, _, _ = import_model(tmp_path)
    plain = dataclasses.replace(transducer, fastemit=0.0, dropout=0.0, sigma=0.0)
    assert imported.transducer == plain
    assert not imported.ctc
    theirs = transformers.ParakeetForTDT.from_pretrained(tmp_path).eval()
    assert theirs.config.pad_token_id == 5
    again = ASRModel.from_state_dict(*import_model(tmp_path)).eval()
    with torch.no_grad():
        loss = again(make_batch(examples[:1])).transducer
        assert_same(loss, their_loss(theirs, examples[0]), "loss")


def test_bfloat16_weights_become_float32(tmp_path):
    theirs = random_model("rnnt").to(torch.bfloat16)
    _, _, state = import_model(saved(theirs, tmp_path))
    weight = state["transducer.output.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, theirs.joint.head.weight.float())


def test_a_canary_leaves_its_transducer_behind(tmp_path, caplog, tiny_config):
    config = dataclasses.replace(
        tiny_config,
        ctc=False,
        decoder=DecoderConfig(width=32, layers=1, heads=2, feed_forward=40, max_positions=64),
        transducer=TransducerConfig(width=12, joint=12, dropout=0.1),
    )
    with caplog.at_level(logging.WARNING):
        assert export_model(ASRModel(config, VOCABULARY), tmp_path) == (
            "CanaryForConditionalGeneration"
        )
    assert "The transducer is not exported: transformers' Canary has none" in caplog.text
    assert "transducer.dropout" not in caplog.text
    assert import_model(tmp_path)[0].transducer is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"predictor": "stateless"}, r"predictor=stateless \(only lstm\)"),
        ({"joint": 20}, r"transducer\.joint=20, not transducer\.width=24"),
    ],
)
def test_what_transformers_cannot_express_is_refused(changes, message, ours, tmp_path):
    transducer = dataclasses.replace(ours.config.transducer, **changes)
    config = dataclasses.replace(ours.config, transducer=transducer)
    with pytest.raises(ValueError, match=message):
        export_model(ASRModel(config, VOCABULARY), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_padding_outside_of_the_vocabulary_is_refused(kind, ours, tmp_path):
    tokens = SpecialTokens(pad_id=VOCABULARY)
    if kind == "rnnt":
        # Its labels are filled with the blank.
        export_model(ours, tmp_path, tokens)
    else:
        with pytest.raises(ValueError, match="`pad_id` must be in the vocabulary of 40, but is 40"):
            export_model(ours, tmp_path, tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "wav2vec2"}, "parakeet_rnnt or parakeet_tdt or whisper, but is wav2vec2"),
        ({"blank_token_id": 0}, "`blank_token_id` must be the last class, 40, but is 0"),
        ({"hidden_act": "gelu"}, r"`config\.hidden_act` must be relu or tanh, but is gelu"),
        ({"num_decoder_layers": 1}, r"decoder\.lstm\.\w+_l1, expected nothing"),
        ({"decoder_hidden_size": 20}, r"expected \(20,.*, found \(24,"),
    ],
)
def test_a_directory_that_does_not_fit_is_refused(change, message, directory, tmp_path):
    with pytest.raises(ValueError, match=message):
        import_model(copy_with(directory, tmp_path, change))


def test_settings_that_are_not_the_models_are_named(tmp_path, caplog):
    saved(random_model("rnnt", max_symbols_per_step=3), tmp_path / "rnnt")
    saved(random_model("tdt", durations=[1, 2]), tmp_path / "tdt")
    with caplog.at_level(logging.WARNING):
        import_model(tmp_path / "rnnt")
    assert "`max_symbols_per_step` = 3 is not part of a model here" in caplog.text
    with pytest.raises(ValueError, match="`durations` must start with 0 and 1"):
        import_model(tmp_path / "tdt")

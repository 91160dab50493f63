"""transformers' Canary and Parakeet models, with random weights, are the oracle of ours."""

import dataclasses
import json
import logging
import shutil

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from effasr.data.batch import IGNORED
from effasr.data.features.config import FeatureConfig
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.decoding.attention_beam import attention_beam
from effasr.decoding.ctc_beam import ctc_beam
from effasr.decoding.transducer_beam import tdt_beam, transducer_beam
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.interop.huggingface.checkpoint import CLASSES, export_model, import_model
from effasr.interop.huggingface.files import SpecialTokens
from effasr.interop.tables import export_weights
from effasr.model.asr import ASRModel
from effasr.model.best_rq import BestRQConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.transducer import TransducerConfig
from effasr_kernels import pack
from tests.support.small_model import shake

transformers = pytest.importorskip("transformers")

BINS, VOCABULARY = 16, 40
DROPOUTS = ("dropout", "dropout_positions", "layerdrop", "activation_dropout", "attention_dropout")
ENCODER = {
    "model_type": "parakeet_encoder", "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 48, "num_mel_bins": BINS,
    "subsampling_conv_channels": 8, "scale_input": True, **dict.fromkeys(DROPOUTS, 0.0),
}  # fmt: skip
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "max_position_embeddings": 64,
}  # fmt: skip
DURATIONS = (0, 1, 2, 3)
TRANSDUCER = {
    "encoder_config": ENCODER, "vocab_size": VOCABULARY + 1, "blank_token_id": VOCABULARY,
    "decoder_hidden_size": 24, "num_decoder_layers": 2,
}  # fmt: skip
STREAMING = {
    **ENCODER, "model_type": "nemotron_asr_streaming_encoder", "sliding_window": 6,
    "default_num_lookahead_tokens": 1,
}  # fmt: skip
WITH_DECODER = ["canary", "canary of 40 ms", "cohere_asr"]
NEMOTRONS = ["nemotron_asr_streaming", "nemotron3_5_asr"]
KINDS = [*WITH_DECODER, "parakeet_rnnt", "parakeet_tdt", *NEMOTRONS]
PROMPTS = {"num_prompts": 6, "prompt_intermediate_size": 20, "default_prompt_id": 5}
LANGUAGES = {"en-US": 0, "en": 0, "de-DE": 3, "auto": 5}
CANARIES = pytest.mark.parametrize("kind", WITH_DECODER, indirect=True, scope="module")
TRANSDUCERS = pytest.mark.parametrize("kind", KINDS[3:], indirect=True, scope="module")
OF_CANARY = pytest.mark.parametrize("kind", WITH_DECODER[:2], indirect=True, scope="module")


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def subsampling(kind):
    return 4 if "40 ms" in kind else 8


@pytest.fixture
def is_causal(request):
    return request.node.callspec.params.get("kind") in NEMOTRONS


@pytest.fixture
def examples(examples):
    """With the numbers of their languages."""
    return [dataclasses.replace(example, expert=n % 6) for n, example in enumerate(examples)]


def class_of(kind):
    return CLASSES[kind.split()[0]]


@pytest.fixture(scope="module")
def theirs(kind, subsampling):
    if kind == "cohere_asr":
        return random_cohere()
    return random_canary(subsampling) if kind in WITH_DECODER else random_transducer(kind)


@pytest.fixture(scope="module")
def directory(theirs, tmp_path_factory):
    return saved(theirs, tmp_path_factory.mktemp("theirs"))


@pytest.fixture
def ours(directory):
    return ASRModel.from_state_dict(*import_model(directory)).eval()


def random_canary(subsampling, **options):
    torch.manual_seed(0)
    encoder = {**ENCODER, "subsampling_factor": subsampling}
    sections = {"encoder_config": encoder, "decoder_config": DECODER}
    config = transformers.CanaryConfig(**sections, vocab_size=VOCABULARY, **options)
    model = transformers.CanaryForConditionalGeneration(config).eval()
    shake(model)
    return model


def random_cohere():
    """The decoder is narrower than the encoder."""
    torch.manual_seed(0)
    decoder = {**DECODER, "hidden_size": 24, "head_dim": 12}
    config = transformers.CohereAsrConfig(**decoder, encoder_config={**ENCODER}, bos_token_id=4)
    model = transformers.CohereAsrForConditionalGeneration(config).eval()
    shake(model)
    return model


@torch.no_grad()
def random_transducer(kind, **options):
    """No bias is zero and no norm at rest; symbols depend on frames and on labels so far.

    Every symbol is as likely as the others on the whole, but blanks are likelier, and no duration
    less so, else a TDT would not go on: transformers does not bound the labels of a frame.
    """
    torch.manual_seed(0)
    if kind == "parakeet_rnnt":
        config = transformers.ParakeetRNNTConfig(**TRANSDUCER, **options)
    elif kind == "nemotron_asr_streaming":
        settings = {**TRANSDUCER, "encoder_config": STREAMING}
        config = transformers.NemotronAsrStreamingConfig(**settings, **options)
    elif kind == "nemotron3_5_asr":
        settings = {**TRANSDUCER, "encoder_config": STREAMING, **PROMPTS}
        config = transformers.Nemotron3_5AsrConfig(**settings, **options)
    else:
        config = transformers.ParakeetTDTConfig(**TRANSDUCER, **{"durations": DURATIONS, **options})
    model = getattr(transformers, class_of(kind).name)(config)
    for name, parameter in model.named_parameters():
        parameter.add_((0.3 if name.startswith("encoder.") else 0.6) * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0.0, 0.3)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0)
    model.eval()
    labels = torch.randint(VOCABULARY, (1, 8))
    features = torch.randn(1, 90, BINS)
    if kind in NEMOTRONS:
        # They are not normalized.
        features = 3.0 * features - 8.0
    logits = model(features, decoder_input_ids=labels).logits
    logits = logits.flatten(0, -2)
    head = model.joint.head.bias
    head -= logits.mean(0)
    head[VOCABULARY] += 2 * logits.std(0).mean()
    head[VOCABULARY + 1 : VOCABULARY + 2] -= 2 * logits.std(0).mean()
    model.generation_config.decoder_start_token_id = VOCABULARY
    if kind == "parakeet_tdt":
        rows = range(VOCABULARY + 1, VOCABULARY + 1 + len(DURATIONS))
        model.generation_config.suppress_tokens = list(rows)
    return model


def saved(model, directory, **options):
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory, **options)
    extractor_of(model).save_pretrained(directory)
    if model.config.model_type == "nemotron3_5_asr":
        settings = json.dumps({"prompt_dictionary": LANGUAGES})
        (directory / "processor_config.json").write_text(settings)
    return directory


def extractor_of(model):
    match model.config.model_type:
        case "cohere_asr":
            # Its noise is none of the model's.
            return transformers.CohereAsrFeatureExtractor(feature_size=BINS, dither=0.0)
        case "nemotron_asr_streaming" | "nemotron3_5_asr":
            return transformers.NemotronAsrStreamingFeatureExtractor(feature_size=BINS)
    return transformers.ParakeetFeatureExtractor(feature_size=BINS)


def features_of(model, *examples):
    extractor, names = extractor_of(model), ("input_features", "attention_mask")
    audio = [example.audio for example in examples]
    features = extractor(audio, sampling_rate=16_000, return_tensors="pt")
    inputs = {name: features[name] for name in names}
    if model.config.model_type == "nemotron3_5_asr":
        inputs["prompt_ids"] = torch.tensor([example.expert for example in examples])
    return inputs


def assert_same(actual, expected, what, least=1e-2):
    """Equal up to 1e-4 of the largest value, or of ``least``."""
    assert actual.shape == expected.shape, what
    scale = expected.abs().max().clamp(min=least)
    error = (actual - expected).abs().max() / scale
    assert error < 1e-4, f"{what}: relative error {error:.2g}"


def assert_same_gradients(ours, theirs, kind, folder, *, least=None):
    """Every gradient, up to 1e-4 of its largest value, or of ``least`` times the largest of all."""
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    converted = export_weights(gradients, class_of(kind).weights)
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    if kind == "cohere_asr":
        # Its files have other names than the parameters.
        theirs.save_pretrained(folder, state_dict=expected)
        saved = safetensors.torch.load_file(folder / "model.safetensors")
        expected = {name.removeprefix("model."): value for name, value in saved.items()}
    assert converted.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert_same(converted[name], gradient, name, 1e-2 if least is None else least * largest)


def canary_inputs(model, example):
    tokens = torch.tensor([example.prompt + example.text])
    targets = [IGNORED] * (len(example.prompt) - 1) + example.text + [3]
    labels = torch.tensor([targets])
    return {**features_of(model, example), "decoder_input_ids": tokens, "labels": labels}


def transducer_inputs(model, example):
    tokens = torch.tensor([[VOCABULARY, *example.text]])
    return {**features_of(model, example), "decoder_input_ids": tokens}


def valid(model, inputs):
    """Encoder frames of one utterance: the features have rows more, which are masked."""
    return int(model._get_output_attention_mask(inputs["attention_mask"]).sum())


def plain_loss(logits, labels):
    """The forward recursion of an RNN-T over logits (T, U + 1, V + 1), differentiable.

    transformers leaves this to torchaudio.
    """
    scores = logits.double().log_softmax(-1)
    frames = len(scores)
    alpha = []
    for t in range(frames):
        row = []
        for u in range(len(labels) + 1):
            ways = [alpha[t - 1][u] + scores[t - 1, u, VOCABULARY]] if t else []
            if u:
                ways.append(row[u - 1] + scores[t, u - 1, labels[u - 1]])
            row.append(torch.stack(ways).logsumexp(0) if ways else scores.new_zeros(()))
        alpha.append(row)
    return -(alpha[-1][-1] + scores[-1, -1, VOCABULARY])


def their_loss(model, example):
    """The negative log-likelihood of an utterance."""
    inputs = transducer_inputs(model, example)
    if "durations" not in model.config.to_dict():
        return plain_loss(model(**inputs).logits[0, : valid(model, inputs)], example.text)
    # transformers divides by the number of labels.
    return model(**inputs, labels=torch.tensor([example.text])).loss * len(example.text)


def their_transcripts(model, *examples):
    """Of `generate`, without blanks and what follows the last frame of a shorter utterance."""
    features = features_of(model, *examples)
    result = model.generate(**features, max_new_tokens=400)
    mask = model.get_audio_features(**features).attention_mask
    frames = result.durations.cumsum(1) - result.durations
    selected = (result.sequences != VOCABULARY) & (frames < mask.sum(1, keepdim=True))
    return [row[keep].tolist() for row, keep in zip(result.sequences, selected, strict=True)]


@CANARIES
@torch.no_grad()
def test_scores_of_a_list_are_sums_of_their_log_probabilities(theirs, ours, examples, make_batch):
    encoded = ours.encode(make_batch(examples))
    prompts = [example.prompt for example in examples]
    limits = [6] * len(examples)
    result = attention_beam(ours, encoded, prompts, limits, 3, beam=4, length_penalty=0.0, nbest=4)
    for example, item in zip(examples, result, strict=True):
        assert len(item.alternatives) == 4
        for other in item.alternatives:
            inputs = canary_inputs(theirs, dataclasses.replace(example, text=list(other.tokens)))
            targets = inputs.pop("labels")[0]
            steps = theirs(**inputs).logits[0].double().log_softmax(-1)
            counted = targets != IGNORED
            expected = steps[counted].gather(1, targets[counted, None]).sum()
            assert other.score == other.rank == pytest.approx(float(expected), abs=1e-4)


@CANARIES
def test_a_packed_batch_of_a_canary_gives_the_same_loss_and_every_gradient(
    kind, theirs, ours, examples, make_batch, subsampling, tmp_path
):
    theirs.zero_grad()
    expected = torch.zeros(())
    for example in examples:
        inputs = canary_inputs(theirs, example)
        logits = theirs(**inputs).logits
        loss = F.cross_entropy(logits[0], inputs["labels"][0], reduction="sum")
        loss.backward()
        expected += loss.detach()
    losses = ours(make_batch(examples, static=True))
    losses.cross_entropy.backward()
    assert_same(losses.cross_entropy, expected, "loss")
    # The bias of keys has no gradient but what is rounded, and more frames round more.
    least = None if subsampling == 8 else 1e-3
    assert_same_gradients(ours, theirs, kind, tmp_path, least=least)


@TRANSDUCERS
def test_a_packed_batch_of_a_transducer_gives_the_same_loss_and_every_gradient(
    kind, theirs, ours, examples, make_batch, tmp_path
):
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
    assert_same_gradients(ours, theirs, kind, tmp_path, least=1e-2)


@TRANSDUCERS
@torch.no_grad()
def test_greedy_transcripts_are_those_of_generate(theirs, ours, examples, make_batch):
    encoded = ours.encode(make_batch(examples))
    result = transducer_greedy(ours.transducer, encoded, max_symbols=10)
    assert result == their_transcripts(theirs, *examples)
    assert result == [their_transcripts(theirs, example)[0] for example in examples]
    assert len({label for transcript in result for label in transcript}) > 2
    assert len(result[0]) < 10 * encoded.layout.lengths[0], "no blank was said"


@TRANSDUCERS
@torch.no_grad()
def test_scores_of_a_list_are_their_losses(theirs, ours, examples, make_batch):
    """With room for all transcripts of one label at all frames ahead, a beam drops no path."""
    head, encoded = ours.transducer, ours.encode(make_batch(examples))
    search = transducer_beam if head.config.durations is None else tdt_beam
    beam = (VOCABULARY + 1) * (1 + max(DURATIONS))
    result = search(head, encoded, beam, [1] * len(examples), 3)
    compared = 0
    for example, listed in zip(examples, result, strict=True):
        assert len(listed) == 3
        # transformers' loss of TDT takes labels that are its padding for none.
        for item in listed:
            if not item.tokens or item.tokens[0] == theirs.config.pad_token_id:
                continue
            compared += 1
            loss = their_loss(theirs, dataclasses.replace(example, text=list(item.tokens)))
            assert item.score == pytest.approx(-float(loss), abs=1e-4)
    assert compared >= 2 * len(examples)


def test_export_is_the_inverse_of_import(theirs, ours, kind, tmp_path):
    assert export_model(ours, tmp_path) == class_of(kind).name
    config, vocabulary, state = import_model(tmp_path)
    assert (config, vocabulary) == (ours.config, ours.vocab_size)
    assert state.keys() == ours.state_dict().keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(state[name], value), name
    extractor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path)
    assert extractor.to_dict() | {"dither": 0.0} == extractor_of(theirs).to_dict() | {"dither": 0.0}


def test_transformers_loads_what_is_exported(theirs, kind, ours, tmp_path, examples):
    export_model(ours, tmp_path)
    loader = getattr(transformers, class_of(kind).name)
    again, report = loader.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    expected = theirs.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, value in again.state_dict().items():
        assert torch.equal(value, expected[name]), name
    if kind not in WITH_DECODER:
        assert again.config.blank_token_id == VOCABULARY
        # Without any setting: the start symbol, and the rows that are no tokens, are in the files.
        assert their_transcripts(again, *examples) == their_transcripts(theirs, *examples)
        return
    inputs = canary_inputs(theirs, examples[0])
    assert torch.equal(again.eval()(**inputs).logits, theirs(**inputs).logits)
    assert again.generation_config.decoder_start_token_id == 7
    assert again.generation_config.max_length == 64
    again.generation_config.max_new_tokens = 3
    assert again.generate(**{k: inputs[k] for k in ("input_features", "attention_mask")}).shape[0]


@CANARIES
def test_a_sharded_checkpoint_is_the_same(theirs, directory, tmp_path):
    saved(theirs, tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    whole, sharded = import_model(directory), import_model(tmp_path)
    assert sharded[:2] == whole[:2]
    assert sharded[2].keys() == whole[2].keys()
    assert all(torch.equal(sharded[2][name], value) for name, value in whole[2].items())


def test_an_untied_output_layer_goes_both_ways(tmp_path):
    theirs = random_canary(8, tie_word_embeddings=False)
    saved(theirs, tmp_path / "theirs")
    model = ASRModel.from_state_dict(*import_model(tmp_path / "theirs"))
    assert torch.equal(model.decoder.output_weight, theirs.proj_out.weight)
    export_model(model, tmp_path / "ours")
    again = transformers.CanaryForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert torch.equal(again.proj_out.weight, theirs.proj_out.weight)
    assert torch.equal(again.get_input_embeddings().weight, theirs.get_input_embeddings().weight)


@pytest.mark.parametrize("kind", ["cohere_asr"], indirect=True, scope="module")
def test_sinusoids_become_the_table_of_positions(ours, examples, make_batch, tmp_path):
    decoder = dataclasses.replace(ours.config.decoder, positions="sinusoidal")
    model = ASRModel(dataclasses.replace(ours.config, decoder=decoder), VOCABULARY).eval()
    export_model(model, tmp_path)
    theirs = transformers.CohereAsrForConditionalGeneration.from_pretrained(tmp_path).eval()
    batch = make_batch([examples[0]])
    hidden, _ = model.decode(batch.tokens, model.encode(batch))
    expected = theirs(**canary_inputs(theirs, examples[0])).logits[0]
    assert_same(model.logits(hidden), expected, "logits")


@OF_CANARY
def test_parakeet_ctc_is_the_same_function(tmp_path, subsampling, examples, make_batch):
    torch.manual_seed(0)
    config = transformers.ParakeetCTCConfig(
        encoder_config={**ENCODER, "subsampling_factor": subsampling},
        vocab_size=VOCABULARY + 1,
        pad_token_id=VOCABULARY,
        ctc_loss_reduction="sum",
    )
    theirs = transformers.ParakeetForCTC(config).eval()
    shake(theirs)
    saved(theirs, tmp_path / "theirs")
    model = ASRModel.from_state_dict(*import_model(tmp_path / "theirs")).eval()
    assert model.vocab_size == VOCABULARY
    batch = make_batch([examples[0]])
    features = features_of(theirs, examples[0])
    expected = theirs(**features, labels=torch.tensor([examples[0].text]))
    assert_same(model.ctc_logits(model.encode(batch).values), expected.logits[0], "logits")
    assert_same(model(batch).ctc, expected.loss, "loss")

    with torch.no_grad():
        # Over two frames, a beam with room for all tokens and the blank drops no path.
        frames = pack([model.encode(batch).values[:2]])
        (listed,) = ctc_beam(model, frames, VOCABULARY + 1, nbest=4)
    steps = expected.logits[0, :2].detach().log_softmax(-1)
    for item in listed:
        text = torch.tensor(item.tokens, dtype=torch.int64)
        loss = F.ctc_loss(steps, text, [2], [len(text)], blank=VOCABULARY, reduction="sum")
        assert item.score == pytest.approx(-float(loss), abs=1e-4)

    export_model(model, tmp_path / "ours")
    again = transformers.ParakeetForCTC.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(**features).logits, theirs(**features).logits)


CANARY = DecoderConfig(width=32, layers=1, heads=2, feed_forward=40, max_positions=64)


@pytest.mark.parametrize(
    ("changes", "name", "warnings"),
    [
        (
            {
                "decoder": dataclasses.replace(CANARY, residual_dropout=0.2),
                "spec_augment": SpecAugmentConfig(freq_masks=1),
            },
            "CanaryForConditionalGeneration",
            ("CTC head is not exported", "decoder.residual_dropout = 0.2, spec_augment"),
        ),
        (
            {"ctc": False, "decoder": CANARY, "transducer": TransducerConfig(dropout=0.1)},
            "CanaryForConditionalGeneration",
            ("The transducer is not exported: transformers' Canary has none",),
        ),
    ],
)
def test_what_a_canary_does_not_have_is_left_out_with_a_warning(
    tmp_path, caplog, tiny_config, changes, name, warnings
):
    config = dataclasses.replace(tiny_config, **changes)
    with caplog.at_level(logging.WARNING):
        assert export_model(ASRModel(config, VOCABULARY), tmp_path) == name
    assert all(warning in caplog.text for warning in warnings)
    assert "transducer.dropout" not in caplog.text
    imported, _, state = import_model(tmp_path)
    assert not imported.ctc
    assert imported.transducer is None
    assert "ctc_head.weight" not in state


@OF_CANARY
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
    for warning in (
        "The CTC head is not exported",
        "transducer.dropout = 0.2, transducer.fastemit = 0.1, transducer.sigma = 0.05",
        "skip the wrong numbers of frames",
    ):
        assert warning in caplog.text
    imported, vocab_size, state = import_model(tmp_path)
    plain = dataclasses.replace(transducer, fastemit=0.0, dropout=0.0, sigma=0.0)
    assert imported.transducer == plain
    assert not imported.ctc
    theirs = transformers.ParakeetForTDT.from_pretrained(tmp_path).eval()
    assert theirs.config.pad_token_id == 5
    again = ASRModel.from_state_dict(imported, vocab_size, state).eval()
    with torch.no_grad():
        loss = again(make_batch(examples[:1])).transducer
        assert_same(loss, their_loss(theirs, examples[0]), "loss")


@pytest.mark.parametrize(
    ("kind", "part", "changes", "message"),
    [
        ("canary", "encoder", {"position": "rotary"}, r"position=rotary \(only relative\)"),
        ("canary", "encoder", {"conv_norm": "layer_norm"}, "conv_norm=layer_norm"),
        ("canary", "encoder", {"input_positions": 0.3}, r"input_positions=0\.3 \(only 0\)"),
        ("canary", "decoder", {"positions": "learned"}, r"positions=learned .* \(only sinusoidal"),
        ("canary", "decoder", {"activation": "gelu"}, r"decoder\.activation=gelu \(only relu\)"),
        ("canary", "decoder", {"embedding_norm": False}, r"decoder\.embedding_norm=False"),
        ("canary", "decoder", {"key_bias": False}, r"decoder\.key_bias=False"),
        ("canary", "features", {"normalize": False}, r"features\.normalize=False"),
        ("parakeet_rnnt", "transducer", {"predictor": "stateless"}, r"stateless \(only lstm\)"),
        ("nemotron_asr_streaming", "encoder", {"context": ()}, r"context=\(\) \(only one"),
        ("nemotron_asr_streaming", "features", {"normalize": True}, r"features\.normalize=True"),
        ("parakeet_rnnt", "transducer", {"joint": 20}, r"joint=20, not transducer\.width=24"),
    ],
    indirect=["kind"],
    scope="module",
)
def test_what_transformers_cannot_express_is_refused(part, changes, message, ours, tmp_path):
    changed = dataclasses.replace(getattr(ours.config, part), **changes)
    config = dataclasses.replace(ours.config, **{part: changed})
    with pytest.raises(ValueError, match=message):
        export_model(ASRModel(config, VOCABULARY), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@CANARIES
def test_tokens_that_are_never_decoded_are_exported(ours, tmp_path):
    decoder = dataclasses.replace(ours.config.decoder, suppress=(5, 6), begin_suppress=(9,))
    model = ASRModel(dataclasses.replace(ours.config, decoder=decoder), VOCABULARY)
    export_model(model, tmp_path, SpecialTokens(count=VOCABULARY - 1))
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == [5, 6, VOCABULARY - 1]
    assert generation["begin_suppress_tokens"] == [9]


def test_special_tokens_outside_of_the_vocabulary_are_refused(kind, ours, tmp_path):
    wrong = SpecialTokens(eos_id=99, pad_id=VOCABULARY)
    if kind in ("parakeet_rnnt", *NEMOTRONS):
        # Its labels are filled with the blank.
        export_model(ours, tmp_path, wrong)
        return
    name = "`pad_id`" if kind == "parakeet_tdt" else "`pad_token_id`"
    with pytest.raises(ValueError, match=f"{name} must be in the vocabulary of 40, but is 40"):
        export_model(ours, tmp_path, wrong)


def test_a_model_without_an_output_is_refused(tiny_config, tmp_path):
    config = dataclasses.replace(
        tiny_config, decoder=None, ctc=False, best_rq=BestRQConfig(codes=8)
    )
    with pytest.raises(ValueError, match="`ctc` must be true for a Parakeet CTC model"):
        export_model(ASRModel(config, VOCABULARY), tmp_path)


@pytest.mark.parametrize(
    ("kind", "section", "change", "message"),
    [
        (
            "canary",
            None,
            {"model_type": "bert"},
            "canary or cohere_asr or .* whisper, but is bert",
        ),
        ("canary", "encoder", {"hidden_act": "gelu"}, "hidden_act` must be silu"),
        ("canary", "decoder", {"num_key_value_heads": 2}, "grouped queries"),
        ("canary", "encoder", {"subsampling_factor": 2}, "must be 4 or 8, but is 2"),
        (
            "canary",
            "encoder",
            {"subsampling_factor": 4},
            r"first is encoder\.subsampling\.\w+\.\w+",
        ),
        ("canary", "encoder", {"num_mel_bins": 24}, "num_mel_bins = 24"),
        ("canary", "encoder", {"num_hidden_layers": 1}, r"encoder\.layers\.1.*nothing"),
        ("canary", "encoder", {"intermediate_size": 50}, r"\(50,\), found \(48,\)"),
        ("cohere_asr", None, {"hidden_size": 32}, "must differ from that of the encoder"),
        ("cohere_asr", None, {"num_key_value_heads": 2}, "grouped queries"),
        ("parakeet_rnnt", None, {"blank_token_id": 0}, "must be the last class, 40, but is 0"),
        ("parakeet_rnnt", None, {"hidden_act": "gelu"}, "must be relu or tanh, but is gelu"),
        ("parakeet_rnnt", None, {"num_decoder_layers": 1}, r"lstm\.\w+_l1, expected nothing"),
        ("parakeet_rnnt", None, {"decoder_hidden_size": 20}, r"expected \(20,.*, found \(24,"),
    ],
    indirect=["kind"],
    scope="module",
)
def test_a_directory_that_does_not_fit_is_refused(section, change, message, directory, tmp_path):
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (config[f"{section}_config"] if section else config).update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        import_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        import_model(tmp_path / "nowhere")


@OF_CANARY
def test_the_preprocessor_may_be_part_of_a_processor_or_missing(directory, tmp_path, subsampling):
    for file in directory.glob("*.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    expected = FeatureConfig(mel_bins=BINS, subsampling=subsampling)
    assert import_model(tmp_path)[0].features == expected
    processor = {"feature_extractor": {"feature_size": BINS, "preemphasis": 0.9}}
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    assert import_model(tmp_path)[0].features.preemphasis == 0.9


def test_settings_that_are_not_the_models_are_named(tmp_path, caplog):
    saved(random_transducer("parakeet_rnnt", max_symbols_per_step=3), tmp_path / "rnnt")
    saved(random_transducer("parakeet_tdt", durations=[1, 2]), tmp_path / "tdt")
    with caplog.at_level(logging.WARNING):
        import_model(tmp_path / "rnnt")
    assert "`max_symbols_per_step` = 3 is not part of a model here" in caplog.text
    with pytest.raises(ValueError, match="`durations` must start with 0 and 1"):
        import_model(tmp_path / "tdt")

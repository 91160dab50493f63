import dataclasses
import json
import logging

import pytest
import torch
import torch.nn.functional as F

from effasr.data.batch import IGNORED
from effasr.data.features.config import FeatureConfig
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.decoding.attention_beam import attention_beam
from effasr.decoding.ctc_beam import ctc_beam
from effasr.interop.huggingface.checkpoint import export_model, import_model
from effasr.interop.huggingface.files import SpecialTokens
from effasr.interop.huggingface.parakeet import CANARY
from effasr.model.asr import ASRModel
from effasr.model.best_rq import BestRQConfig
from effasr_kernels import pack
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
from tests.support.small_model import shake

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module", params=[8, 4])
def subsampling(request):
    return request.param


@pytest.fixture(scope="module")
def encoder_config(subsampling):
    return {**ENCODER, "subsampling_factor": subsampling}


@pytest.fixture(scope="module")
def theirs(encoder_config):
    torch.manual_seed(0)
    config = transformers.CanaryConfig(
        encoder_config=encoder_config, decoder_config=DECODER, vocab_size=VOCABULARY
    )
    model = transformers.CanaryForConditionalGeneration(config).eval()
    shake(model)
    return model


@pytest.fixture(scope="module")
def directory(theirs, tmp_path_factory):
    return saved(theirs, tmp_path_factory.mktemp("canary"))


@pytest.fixture
def ours(directory):
    return ASRModel.from_state_dict(*import_model(directory)).eval()


def their_inputs(example):
    tokens = torch.tensor([example.prompt + example.text])
    targets = [IGNORED] * (len(example.prompt) - 1) + example.text + [3]
    labels = torch.tensor([targets])
    return {**features_of(example), "decoder_input_ids": tokens, "labels": labels}


def test_each_utterance_gives_the_same_logits_and_loss(theirs, ours, examples, make_batch):
    for example in examples:
        expected = theirs(**their_inputs(example))
        batch = make_batch([example])
        encoded = ours.encode(batch)
        hidden, _ = ours.decode(batch.tokens, encoded)
        assert_same(ours.logits(hidden), expected.logits[0], f"logits of {example.id}")
        # Theirs is the mean over the counted targets.
        loss = ours(batch).cross_entropy / batch.num_targets
        assert_same(loss, expected.loss, f"loss of {example.id}")


@torch.no_grad()
def test_scores_of_a_list_are_sums_of_their_log_probabilities(theirs, ours, examples, make_batch):
    encoded = ours.encode(make_batch(examples))
    prompts = [example.prompt for example in examples]
    limits = [6] * len(examples)
    found = attention_beam(ours, encoded, prompts, limits, 3, beam=4, length_penalty=0.0, nbest=4)
    for example, one in zip(examples, found, strict=True):
        assert len(one.alternatives) == 4
        for other in one.alternatives:
            inputs = their_inputs(dataclasses.replace(example, text=list(other.tokens)))
            targets = inputs.pop("labels")[0]
            steps = theirs(**inputs).logits[0].double().log_softmax(-1)
            counted = targets != IGNORED
            expected = steps[counted].gather(1, targets[counted, None]).sum()
            assert other.score == other.rank == pytest.approx(float(expected), abs=1e-4)


def test_a_packed_batch_gives_the_same_loss_and_every_gradient(
    theirs, ours, examples, make_batch, subsampling
):
    theirs.zero_grad()
    expected = torch.zeros(())
    for example in examples:
        inputs = their_inputs(example)
        logits = theirs(**inputs).logits
        loss = F.cross_entropy(logits[0], inputs["labels"][0], reduction="sum")
        loss.backward()
        expected += loss.detach()
    losses = ours(make_batch(examples, static=True))
    losses.cross_entropy.backward()
    assert_same(losses.cross_entropy, expected, "loss")
    # The bias of keys has no gradient but what is rounded, and more frames round more.
    least = None if subsampling == 8 else 1e-3
    assert_same_gradients(ours, theirs, CANARY, least=least)


def test_export_is_the_inverse_of_import(ours, tmp_path):
    assert_export_inverts_import(ours, tmp_path, export_model)


def test_transformers_loads_what_is_exported(theirs, ours, tmp_path, examples):
    export_model(ours, tmp_path)
    again, report = transformers.CanaryForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    inputs = their_inputs(examples[0])
    assert torch.equal(again.eval()(**inputs).logits, theirs(**inputs).logits)
    assert again.generation_config.decoder_start_token_id == 7
    assert again.generation_config.max_length == 64
    again.generation_config.max_new_tokens = 3
    assert again.generate(**{k: inputs[k] for k in ("input_features", "attention_mask")}).shape[0]


def test_a_sharded_checkpoint_is_the_same(theirs, directory, tmp_path):
    saved(theirs, tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    whole, sharded = import_model(directory), import_model(tmp_path)
    assert sharded[:2] == whole[:2]
    assert sharded[2].keys() == whole[2].keys()
    assert all(torch.equal(sharded[2][name], value) for name, value in whole[2].items())


def test_an_untied_output_layer_goes_both_ways(tmp_path, encoder_config):
    config = transformers.CanaryConfig(
        encoder_config=encoder_config,
        decoder_config=DECODER,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    theirs = transformers.CanaryForConditionalGeneration(config).eval()
    shake(theirs)
    saved(theirs, tmp_path / "theirs")
    model = ASRModel.from_state_dict(*import_model(tmp_path / "theirs"))
    assert torch.equal(model.decoder.output_weight, theirs.proj_out.weight)
    export_model(model, tmp_path / "ours")
    again = transformers.CanaryForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert torch.equal(again.proj_out.weight, theirs.proj_out.weight)
    assert torch.equal(again.get_input_embeddings().weight, theirs.get_input_embeddings().weight)


def test_parakeet_ctc_is_the_same_function(tmp_path, encoder_config, examples, make_batch):
    torch.manual_seed(0)
    config = transformers.ParakeetCTCConfig(
        encoder_config=encoder_config,
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
    features = features_of(examples[0])
    expected = theirs(**features, labels=torch.tensor([examples[0].text]))
    assert_same(model.ctc_logits(model.encode(batch).values), expected.logits[0], "logits")
    assert_same(model(batch).ctc, expected.loss, "loss")

    with torch.no_grad():
        # Over two frames, a beam with room for all tokens and the blank drops no path.
        frames = pack([model.encode(batch).values[:2]])
        (listed,) = ctc_beam(model, frames, VOCABULARY + 1, nbest=4)
    steps = expected.logits[0, :2].detach().log_softmax(-1)
    for one in listed:
        text = torch.tensor(one.tokens, dtype=torch.int64)
        loss = F.ctc_loss(steps, text, [2], [len(text)], blank=VOCABULARY, reduction="sum")
        assert one.score == pytest.approx(-float(loss), abs=1e-4)

    export_model(model, tmp_path / "ours")
    again = transformers.ParakeetForCTC.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(**features).logits, theirs(**features).logits)


def test_what_only_training_uses_is_left_out_with_a_warning(tmp_path, caplog, tiny_config):
    config = dataclasses.replace(
        tiny_config,
        decoder=dataclasses.replace(tiny_config.decoder, width=32, heads=4, residual_dropout=0.2),
        spec_augment=SpecAugmentConfig(freq_masks=1),
    )
    with caplog.at_level(logging.WARNING):
        export_model(ASRModel(config, VOCABULARY), tmp_path)
    assert "CTC head is not exported" in caplog.text
    assert "decoder.residual_dropout = 0.2, spec_augment" in caplog.text
    imported, _, state = import_model(tmp_path)
    assert not imported.ctc
    assert "ctc_head.weight" not in state


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("encoder", {"position": "rotary"}, r"position=rotary \(only relative\)"),
        ("encoder", {"conv_norm": "layer_norm"}, "conv_norm=layer_norm"),
        ("encoder", {"subsampling_norm": True}, "subsampling_norm"),
        ("encoder", {"input_positions": 0.3}, r"input_positions=0\.3 \(only 0\)"),
        ("decoder", {"width": 24}, r"decoder\.width=24, not encoder\.width=32"),
        ("decoder", {"positions": "learned"}, r"decoder\.positions=learned \(only sinusoidal\)"),
        ("decoder", {"activation": "gelu"}, r"decoder\.activation=gelu \(only relu\)"),
        ("decoder", {"embedding_norm": False}, r"decoder\.embedding_norm=False"),
        ("decoder", {"key_bias": False}, r"decoder\.key_bias=False"),
        ("features", {"normalize": False}, r"features\.normalize=False"),
    ],
)
def test_what_transformers_cannot_express_is_refused(part, changes, message, ours, tmp_path):
    changed = dataclasses.replace(getattr(ours.config, part), **changes)
    config = dataclasses.replace(ours.config, **{part: changed})
    with pytest.raises(ValueError, match=message):
        export_model(ASRModel(config, VOCABULARY), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tokens_that_are_never_decoded_are_exported(ours, tmp_path):
    decoder = dataclasses.replace(ours.config.decoder, suppress=(5, 6), begin_suppress=(9,))
    model = ASRModel(dataclasses.replace(ours.config, decoder=decoder), VOCABULARY)
    export_model(model, tmp_path, SpecialTokens(count=VOCABULARY - 1))
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == [5, 6, VOCABULARY - 1]
    assert generation["begin_suppress_tokens"] == [9]


def test_a_model_without_an_output_and_other_special_tokens_are_refused(ours, tmp_path):
    config = dataclasses.replace(ours.config, decoder=None, best_rq=BestRQConfig(codes=8))
    with pytest.raises(ValueError, match="`ctc` must be true for a Parakeet CTC model"):
        export_model(ASRModel(config, VOCABULARY), tmp_path)
    with pytest.raises(ValueError, match=r"`eos_token_id`.*vocabulary of 40, but is 99"):
        export_model(ours, tmp_path, SpecialTokens(eos_id=99))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "must be canary or parakeet_ctc or .* or whisper, but is bert"),
        ({"encoder_config": {**ENCODER, "hidden_act": "gelu"}}, "hidden_act` must be silu"),
        ({"decoder_config": {**DECODER, "num_key_value_heads": 2}}, "grouped queries"),
        ({"encoder_config": {**ENCODER, "subsampling_factor": 2}}, "must be 4 or 8, but is 2"),
        ({"encoder_config": {**ENCODER, "num_mel_bins": 24}}, "num_mel_bins = 24"),
        ({"encoder_config": {**ENCODER, "num_hidden_layers": 1}}, r"encoder\.layers\.1.*nothing"),
        ({"encoder_config": {**ENCODER, "intermediate_size": 50}}, r"\(50,\), found \(48,\)"),
    ],
)
def test_a_directory_that_does_not_fit_is_refused(
    change, message, subsampling, directory, tmp_path
):
    if "encoder_config" in change:
        encoder = {"subsampling_factor": subsampling, **change["encoder_config"]}
        change = {**change, "encoder_config": encoder}
    with pytest.raises(ValueError, match=message):
        import_model(copy_with(directory, tmp_path, change))


def test_weights_of_another_subsampling_are_refused_by_name(subsampling, directory, tmp_path):
    other = copy_with(
        directory, tmp_path, {"encoder_config": {**ENCODER, "subsampling_factor": 12 - subsampling}}
    )
    with pytest.raises(ValueError, match=r"first is encoder\.subsampling\.\w+\.\w+, expected"):
        import_model(other)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        import_model(tmp_path / "nowhere")


def test_the_preprocessor_may_be_part_of_a_processor_or_missing(directory, tmp_path, subsampling):
    for file in directory.glob("*.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    expected = FeatureConfig(mel_bins=BINS, subsampling=subsampling)
    assert import_model(tmp_path)[0].features == expected
    processor = {"feature_extractor": {"feature_size": BINS, "preemphasis": 0.9}}
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    assert import_model(tmp_path)[0].features.preemphasis == 0.9

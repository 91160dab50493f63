"""What a .nemo file may hold, and what is refused, in and out."""

import copy
import gzip
import io
import logging
import os
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from effasr.interop.nemo.archive import read_archive, write_archive
from effasr.interop.nemo.checkpoint import export_nemo, import_nemo
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import TransducerConfig
from effasr_kernels import Context

FOLDER = Path(__file__).parent / "nemo"
LAYERS = "transf_decoder.config_dict"
BLANK = "decoder.prediction.embed.weight"


@pytest.fixture(scope="module")
def archives():
    return {name: read_archive(FOLDER / f"{name}.nemo") for name in ("rnnt", "hybrid", "canary")}


@pytest.fixture
def changed(archives, tmp_path):
    """The file of a case with other options, by dotted name, or other weights."""

    def change(case, options=None, weights=None):
        archive = archives[case]
        config = copy.deepcopy(archive.config)
        for name, value in (options or {}).items():
            *path, last = name.split(".")
            section = config
            for part in path:
                section = section[part]
            section[last] = value
        state = archive.weights | (weights or {})
        state = {key: value for key, value in state.items() if value is not None}
        write_archive(tmp_path / "changed.nemo", config, state, archive.files)
        return tmp_path / "changed.nemo"

    return change


@pytest.mark.parametrize(
    ("case", "option", "value", "message"),
    [
        ("rnnt", "adapters", {"a": {}}, "`adapters` must be empty"),
        ("rnnt", "preprocessor._target_", "x.AudioToMFCCPreprocessor", "`preprocessor._target_`"),
        (
            "rnnt",
            "target",
            "mine.CTC",
            "is mine.CTC: these .* Of a class that derives from one of t",
        ),
        ("rnnt", "encoder.d_model", "${encoder.none}", "`encoder.d_model` must be an int, but is"),
        ("rnnt", "preprocessor.normalize", "all_features", "per_feature or NA, but is 'all_fe"),
        ("rnnt", "preprocessor.window", "hamming", "`preprocessor.window` must be hann, but is"),
        ("rnnt", "preprocessor.log_zero_guard_value", 1e-5, "2 \\*\\* -24, but is 1e-05"),
        ("rnnt", "preprocessor.highfreq", 7600, "`preprocessor.highfreq` must be 8000 or null"),
        ("rnnt", "preprocessor.sample_rate", "${sr}", "`preprocessor.sample_rate` must be an int"),
        ("rnnt", "preprocessor.new", 1, "`preprocessor.new` must be left out, as it is unknown"),
        ("rnnt", "preprocessor.features", 16, "`encoder.feat_in` must be preprocessor.features"),
        ("rnnt", "encoder.att_context_size", [70], "must be two numbers of at least -1"),
        ("rnnt", "encoder.att_context_style", "chunked_limited_with_rc", "must be regular or chu"),
        ("rnnt", "encoder.causal_downsampling", "no", "must be true or false"),
        ("rnnt", "encoder.causal_downsampling", True, r"subsampling\.linear\.weight, expected"),
        ("rnnt", "encoder.conv_context_size", [3, 1], r"must be null or \[2, 2\]"),
        ("rnnt", "encoder.self_attention_model", "rel_pos_local_attn", "must be rel_pos, but"),
        ("rnnt", "encoder.subsampling", "striding", "must be dw_striding, but is striding"),
        ("rnnt", "encoder.subsampling_factor", 2, "must be 4 or 8, but is 2"),
        ("rnnt", "encoder.subsampling_factor", 4, "first is encoder.pre_encode.conv.5.bias"),
        ("rnnt", "encoder.conv_norm_type", "group_norm8", "batch_norm or layer_norm, but is group"),
        ("rnnt", "encoder.feat_out", 12, "`encoder.feat_out` must be -1 or d_model = 16"),
        ("rnnt", "encoder.use_bias", None, "`encoder.use_bias` must be true or false"),
        ("rnnt", "decoder._target_", "x.StatelessTransducerDecoder", "must be RNNTDecoder"),
        ("rnnt", "decoder.normalization_mode", "layer", "must be null, but is layer"),
        ("rnnt", "decoder.blank_as_pad", False, "must be true, but is false"),
        ("rnnt", "decoder.prednet.rnn_hidden_size", 64, "must be pred_hidden = 12, but is 64"),
        ("rnnt", "joint.jointnet.activation", "sigmoid", "relu or tanh, but is sigmoid"),
        ("rnnt", "joint.num_extra_outputs", 2, "the number of durations of the loss = 0, but"),
        ("rnnt", "loss.loss_name", "multiblank_rnnt", "big blanks, multiblank_rnnt"),
        ("rnnt", "tokenizer.langs.de.type", "wpe", "`tokenizer.langs.de.type` must be bpe"),
        ("rnnt", "tokenizer.langs.de.model_path", "nemo:x", "must name a file in it"),
        ("hybrid", "aux_ctc.decoder", None, "`aux_ctc.decoder` must be a mapping, but is None"),
        ("hybrid", "loss.tdt_kwargs.durations", [1, 2, 3, 4], "must start with 0 and 1"),
        ("canary", "transf_encoder.num_layers", 2, "`transf_encoder.num_layers` must be 0"),
        ("canary", f"{LAYERS}.pre_ln", False, "pre_ln` must be true, but"),
        ("canary", f"{LAYERS}.hidden_act", "gelu", "must be relu, but is gelu"),
        ("canary", f"{LAYERS}.learn_positional_encodings", True, "must be false, but is true"),
        ("canary", "head.num_layers", 2, "`head.num_layers` must be 1, but is 2"),
        ("canary", "tokenizer.custom_tokenizer", None, "must be CanaryTokenizer where"),
    ],
)
def test_what_is_other_than_here_is_refused(changed, case, option, value, message):
    with pytest.raises(ValueError, match=message) as error:
        import_nemo(changed(case, {option: value}))
    assert "changed.nemo" in str(error.value)


@pytest.mark.parametrize(
    ("case", "weights", "message"),
    [
        ("rnnt", {"joint.enc.bias": None}, r"encoder_projection.bias, expected \(20,\), found not"),
        ("rnnt", {"extra.weight": torch.ones(2)}, r"extra.weight, expected nothing, found \(2,\)"),
        ("rnnt", {"joint.enc.bias": torch.ones(3)}, r"expected \(20,\), found \(3,\)"),
        ("rnnt", {BLANK: torch.ones(48, 12)}, "must be zero in its last row, the blank's"),
        ("rnnt", {"preprocessor.featurizer.fb": torch.ones(1, 8, 257)}, "with other features"),
        ("canary", {"log_softmax.mlp.layer0.weight": torch.ones(64, 12)}, "output layer of its o"),
    ],
)
def test_other_weights_are_refused(changed, case, weights, message):
    with pytest.raises(ValueError, match=message):
        import_nemo(changed(case, weights=weights))


def test_what_is_trained_otherwise_is_named(changed, caplog):
    options = {
        "encoder.stochastic_depth_drop_prob": 0.1,
        "spec_augment.time_width": 70,
        "spec_augment.rect_masks": 2,
        "decoding.greedy.max_symbols": 5,
        "loss.tdt_kwargs.omega": 0.2,
    }
    with caplog.at_level(logging.WARNING):
        imported = import_nemo(changed("hybrid", options))
    first, second = (record.message for record in caplog.records)
    for name in (
        "encoder.stochastic_depth_drop_prob = 0.1",
        "spec_augment.rect_masks = 2",
        "spec_augment.time_masks = 10 of 70 frames",
        "joint.jointnet.dropout = 0.2",
        "loss.tdt_kwargs.omega = 0.2",
    ):
        assert name in first
    assert "`decoding.greedy.max_symbols` = 5" in second
    assert imported.config.spec_augment.time_masks == 0
    assert imported.config.spec_augment.freq_masks == 2


def test_references_within_a_configuration_are_followed(archives, changed):
    config = archives["rnnt"].config
    width, features = config["encoder"]["d_model"], config["preprocessor"]["features"]
    defaults = {"model_defaults": {"enc_hidden": width, "bands": features}}
    references = {
        "encoder.d_model": "${model_defaults.enc_hidden}",
        "encoder.feat_in": "${model_defaults.bands}",
    }
    model = import_nemo(changed("rnnt", defaults | references))
    assert model.config == import_nemo(FOLDER / "rnnt.nemo").config


def test_defaults_of_nemo_are_filled_in(changed):
    """A file need not repeat them; some are none that are possible here."""
    path = changed("rnnt", {"preprocessor.n_fft": None, "preprocessor.preemph": None})
    features = import_nemo(path).config.features
    assert (features.n_fft, features.preemphasis) == (512, 0)
    archive = read_archive(path)
    del archive.config["encoder"]["subsampling"]
    write_archive(path, archive.config, archive.weights, archive.files)
    with pytest.raises(ValueError, match="must be dw_striding, but is striding"):
        import_nemo(path)


def test_half_precision_becomes_float32(changed, archives):
    weights = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in archives["rnnt"].weights.items()
    }
    state = import_nemo(changed("rnnt", weights=weights)).state
    expected = weights["joint.enc.weight"].float()
    assert torch.equal(state["transducer.encoder_projection.weight"], expected)


def members(path):
    with tarfile.open(path) as tar:
        files = [member for member in tar.getmembers() if member.isfile()]
        return [(member, tar.extractfile(member).read()) for member in files]  # type: ignore[union-attr]


def write(path, content):
    with tarfile.open(path, "w") as tar:
        for member, data in content:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("prefix", ["../", "/tmp/", "sub/", "./../"])
def test_no_member_gets_out_of_the_tar(tmp_path, prefix):
    """What is not at its top is not looked at, and nothing is written by its name."""
    content = members(FOLDER / "rnnt.nemo")
    evil = tarfile.TarInfo(f"{prefix}model_config.yaml")
    inside = tmp_path / "inside"
    inside.mkdir()
    imported = import_nemo(write(inside / "x.nemo", [(evil, b"a: 1"), *content]))
    assert imported.config.transducer is not None
    assert not any("/" in name for name in read_archive(inside / "x.nemo").files)
    moved = [(tarfile.TarInfo(prefix + Path(m.name).name), data) for m, data in content]
    with pytest.raises(ValueError, match=r"has no model_config.yaml and no model_weights.ckpt"):
        import_nemo(write(inside / "y.nemo", moved))
    assert os.listdir(tmp_path) == ["inside"]
    assert sorted(os.listdir(inside)) == ["x.nemo", "y.nemo"]


def test_a_link_in_the_tar_is_not_followed(tmp_path):
    secret = tmp_path / "model_config.yaml"
    secret.write_text("target: EncDecRNNTBPEModel")
    content = [(m, d) for m, d in members(FOLDER / "rnnt.nemo") if "config" not in m.name]
    link = tarfile.TarInfo("./model_config.yaml")
    link.type, link.linkname = tarfile.SYMTYPE, str(secret)
    with pytest.raises(ValueError, match=r"has no model_config.yaml"):
        import_nemo(write(tmp_path / "x.nemo", [(link, b""), *content]))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/nowhere/to/be/made",)


def test_no_program_in_a_checkpoint_is_run(tmp_path):
    content = members(FOLDER / "rnnt.nemo")
    buffer = io.BytesIO()
    torch.save({"weight": Evil()}, buffer, pickle_module=pickle)
    content = [(m, buffer.getvalue() if "weights" in m.name else data) for m, data in content]
    with pytest.raises(ValueError, match="must hold tensors alone, but does not"):
        import_nemo(write(tmp_path / "x.nemo", content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"no tar at all", "must be a .nemo file, a tar, but cannot be read"),
        (lambda data: data[: len(data) // 2], "must be a .nemo file, a tar, but cannot be read"),
        (lambda data: gzip.decompress(data)[:40_000], "a tar, but cannot be read"),
        (lambda data: b"", "a tar, but is empty"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage, message):
    path = tmp_path / "x.nemo"
    path.write_bytes(damage((FOLDER / "rnnt.nemo").read_bytes()))
    with pytest.raises(ValueError, match=message):
        import_nemo(path)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        import_nemo(tmp_path / "other.nemo")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("config", b"a: [", "model_config.yaml is not valid YAML"),
        ("config", b"- a", "model_config.yaml must be a mapping"),
        ("weights", b"PK\x03\x04", "model_weights.ckpt is damaged"),
        ("weights", b"PK\x03\x04" + 5000 * b"x", "model_weights.ckpt is damaged"),
        ("tokenizer.model", b"x", "is no SentencePiece model"),
        ("config", None, "must be a .nemo file, but has no model_config.yaml"),
        ("weights", None, "must be a .nemo file, but has no model_weights.ckpt"),
    ],
)
def test_a_damaged_member_is_refused(tmp_path, name, damage, message):
    content = [(m, damage if name in m.name else d) for m, d in members(FOLDER / "rnnt.nemo")]
    content = [(m, d) for m, d in content if d is not None]
    with pytest.raises(ValueError, match=message):
        import_nemo(write(tmp_path / "x.nemo", content))


@pytest.fixture(scope="module")
def tokenizer():
    return import_nemo(FOLDER / "canary.nemo").tokenizer


SMALL = FastConformerConfig(width=16, layers=1, heads=2, feed_forward=32, subsampling_channels=4)
DECODER = {"width": 16, "layers": 1, "heads": 2, "feed_forward": 16}
CANARY = ModelConfig(encoder=SMALL, decoder=DecoderConfig(**DECODER))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder": {"position": "rotary"}}, "NeMo has no encoder.position=rotary"),
        ({"encoder": {"input_positions": 0.3}}, r"input_positions=0.3 \(only 0\)"),
        (
            {"encoder": {"context": (Context(4, 0, 3),)}},
            r"no encoder\.context with `right` an",
        ),
        ({"encoder": {"feed_forward": 40}}, "feed_forward=40, not a multiple of the width"),
        ({"decoder": {"tie_embeddings": False}}, "no decoder.tie_embeddings=False"),
        ({"decoder": {"head_dim": 4}}, "decoder.head_dim=4, not decoder.width / decoder.heads"),
        ({"decoder": {"activation": "gelu"}}, r"decoder.activation=gelu \(only relu\)"),
        ({"decoder": {"suppress": (3,)}}, r"decoder.suppress=\(3,\)"),
        ({"transducer": {"predictor": "stateless"}}, r"predictor=stateless \(only lstm\)"),
    ],
)
def test_what_nemo_has_not_is_refused(tokenizer, tmp_path, options, message):
    ((part, values),) = options.items()
    if part == "transducer":
        config = ModelConfig(encoder=SMALL, decoder=None, transducer=TransducerConfig(**values))
    else:
        config = replace(CANARY, **{part: replace(getattr(CANARY, part), **values)})
    with torch.device("meta"):
        model = ASRModel(config, tokenizer.vocab_size)
    with pytest.raises(ValueError, match=message):
        export_nemo(model, tokenizer, tmp_path / "x.nemo")
    assert not any(tmp_path.iterdir())


def test_a_canary_needs_a_tokenizer_with_prompts(tmp_path):
    tokenizer = import_nemo(FOLDER / "rnnt.nemo").tokenizer
    model = ASRModel(CANARY, tokenizer.vocab_size)
    with pytest.raises(ValueError, match="must have the tokens of a Canary's prompts"):
        export_nemo(model, tokenizer, tmp_path / "x.nemo")


def test_what_is_left_out_is_named(tokenizer, tmp_path, caplog):
    config = ModelConfig(
        encoder=SMALL,
        decoder=DecoderConfig(**DECODER, activation_dropout=0.1),
        transducer=TransducerConfig(width=8, joint=8),
        ctc=True,
    )
    model = ASRModel(config, tokenizer.vocab_size)
    with caplog.at_level(logging.WARNING):
        name = export_nemo(model, tokenizer, tmp_path / "x.nemo")
    assert name == "EncDecMultiTaskModel"
    assert [record.message for record in caplog.records] == [
        "The CTC head is not exported: NeMo's EncDecMultiTaskModel has none.",
        "The transducer is not exported: NeMo's EncDecMultiTaskModel has none.",
        "Options of training are not exported: decoder.activation_dropout = 0.1.",
    ]
    assert os.listdir(tmp_path) == ["x.nemo"]


def test_the_same_model_gives_the_same_file(tokenizer, tmp_path):
    model = ASRModel(CANARY, tokenizer.vocab_size)
    for name in ("a.nemo", "b.nemo"):
        export_nemo(model, tokenizer, tmp_path / name)
    assert (tmp_path / "a.nemo").read_bytes() == (tmp_path / "b.nemo").read_bytes()

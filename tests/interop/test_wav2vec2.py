"""transformers' wav2vec 2.0 and its kin, with random weights, are the oracle of ours."""

import json
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from effasr.checkpoint import load_model
from effasr.cli.main import main
from effasr.data.batch import StaticShape
from effasr.data.collate import Example, collate
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.data.tokenizer import CharacterTokenizer, NoTokenizer, load_tokenizer
from effasr.interop.huggingface.checkpoint import CLASSES, export_model, import_model
from effasr.interop.huggingface.files import SpecialTokens
from effasr.interop.tables import export_weights
from effasr.model.asr import ASRModel
from effasr.model.wav2vec2_encoder import Wav2Vec2Encoder

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

LETTERS = ["|", *"ETAONIHSRDLUMWCFGYPBVK'XJQZ", "É"]
VOCABULARY = {token: n for n, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *LETTERS])}
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "vocab_size": len(VOCABULARY), "layerdrop": 0.0,
    **{f"{x}_dropout": 0.0 for x in ("hidden", "activation", "attention", "feat_proj", "final")},
}  # fmt: skip
LARGE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
KINDS = {
    "base": ("wav2vec2", {}),
    "large": ("wav2vec2", {**LARGE, "mask_time_prob": 0.0, "pad_token_id": len(VOCABULARY) - 1}),
    "mms": ("wav2vec2", {**LARGE, "adapter_attn_dim": 6}),
    "hubert": ("hubert", {"conv_bias": True}),
    "omniasr": ("omniasr_ctc", {}),
    "wavlm": ("wavlm", {"num_buckets": 16, "max_bucket_distance": 20}),
    "wavlm large": ("wavlm", LARGE),
}
UNKNOWN = {"__type": "AddedToken", "content": "[UNK]"}
SAMPLES = 14_005, 2_719, 399, 8_000, 3_000, 400
"""One is too short for a frame; others have samples after their last one."""


def make_wav2vec2(folder, kind):
    family, options = KINDS[kind]
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    name = CLASSES[family].name
    if kind == "omniasr":
        names = transformers.OmniASRAudioConfig().to_dict().keys() & SIZES
        audio = {option: SIZES[option] for option in names}
        config = transformers.OmniASRCTCConfig(audio_config=audio, vocab_size=len(VOCABULARY))
    else:
        config = getattr(transformers, name.replace("ForCTC", "Config"))(**SIZES, **options)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        # So that it says different things, and no special token.
        head = model.ctc_head if kind == "omniasr" else model.lm_head
        head.weight.mul_(8)
        head.bias[[1, 2, 3]] = -100.0
    model.save_pretrained(folder)
    extractor_of(model).save_pretrained(folder)
    if kind == "omniasr":
        write_sentences(folder)
    else:
        write_tokenizer(folder, dict(VOCABULARY))
    return model


def write_sentences(folder):
    """A tokenizer of characters as omniASR has it: the blank is the first token."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"".join(LETTERS[1:]).lower()]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(names[:4])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))


def make_pretrained(folder, name):
    """A model without a head for CTC, and so without a tokenizer."""
    kind = name.removesuffix("Model").removesuffix("ForPreTraining")
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(folder)
    extractor_of(model).save_pretrained(folder)
    return model


def write_tokenizer(folder, vocabulary, **settings):
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    settings = {"tokenizer_class": "Wav2Vec2CTCTokenizer", "pad_token": "<pad>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def extractor_of(model):
    if model.config.model_type == "omniasr_ctc":
        return transformers.OmniASRFeatureExtractor()
    masked = model.config.feat_extract_norm == "layer"
    return transformers.Wav2Vec2FeatureExtractor(return_attention_mask=masked)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def directory(kind, tmp_path_factory):
    return tmp_path_factory.mktemp("theirs")


@pytest.fixture(scope="module")
def theirs(kind, directory):
    return make_wav2vec2(directory, kind)


@pytest.fixture
def ours(theirs, directory):
    return ASRModel.from_state_dict(*import_model(directory)).eval()


def spoken(samples=SAMPLES):
    random = np.random.default_rng(0)
    return [
        Example(
            id=str(number),
            # Neither mean nor loudness is that of the others.
            audio=((number + 1) * 0.1 * random.standard_normal(count) + 0.2 * number).astype("f4"),
            prompt=[1],
            text=random.integers(3, 20, min(3, count // 1_000)).tolist(),
        )
        for number, count in enumerate(samples)
    ]


def batch_of(model, examples, *, static=True):
    framing = model.config.features.framing
    shape = StaticShape(frame_budget=110, token_budget=60, max_sequences=8, framing=framing)
    framed = None if static else framing
    return collate(examples, shape if static else None, eos_id=1, pad_id=0, framing=framed)


def their_logits(model, example):
    """Of an utterance alone, with the classes in our order."""
    values = extractor_of(model)(example.audio, sampling_rate=16_000, return_tensors="pt")
    logits, blank = model(values.input_values).logits[0], model.config.pad_token_id
    never = logits[:, :0]
    if model.config.model_type == "omniasr_ctc":
        blank, never = 0, torch.full_like(logits[:, :1], -1e4)
    return torch.cat([never, logits[:, :blank], logits[:, blank + 1 :], logits[:, blank, None]], 1)


def assert_same(actual, expected, name):
    assert actual.shape == expected.shape, name
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-2)
    assert error < 1e-4, f"{name}: relative error {error:.2g}"


def test_a_packed_batch_gives_the_same_logits_loss_and_gradients(theirs, ours, kind):
    examples = spoken()
    batch = batch_of(ours, examples)
    logits = ours.ctc_logits(ours.encode(batch).values)
    assert logits.isfinite().all()
    expected, blank = [], ours.vocab_size
    for number, example in enumerate(examples):
        begin, end = batch.frames.cu_seqlens_host[number : number + 2]
        if end > begin:
            result = their_logits(theirs, example)
            assert_same(logits[begin:end], result, f"logits of {example.id}")
            labels, length = torch.tensor([example.text]), torch.tensor([len(result)])
            scores, count = result.log_softmax(-1)[:, None], torch.tensor([labels.shape[1]])
            options = {"blank": blank, "reduction": "sum"}
            expected.append(F.ctc_loss(scores, labels, length, count, **options))
    theirs.zero_grad()
    torch.stack(expected).sum().backward()
    loss = ours(batch).ctc.sum()
    loss.backward()
    assert_same(loss.detach(), torch.stack(expected).sum().detach(), "loss")
    names = {name: x.grad for name, x in ours.named_parameters() if name.startswith("encoder.")}
    # The weight of positions is a product in their model, and no frame is masked.
    del names["encoder.positions.conv.weight"]
    names.pop("encoder.mask_embedding", None)
    gradients = export_weights(names, CLASSES[KINDS[kind][0]].weights)
    largest = max(float(x.abs().max()) for x in gradients.values())
    for name, parameter in theirs.named_parameters():
        if name in gradients:
            error = (gradients[name] - parameter.grad).abs().max()
            assert error < 1e-4 * max(float(parameter.grad.abs().max()), 1e-2 * largest), name
    torch.optim.SGD(ours.parameters(), lr=1e-6).step()
    assert ours(batch).ctc.sum() < loss


def test_spec_augment_hides_frames_and_channels(ours):
    batch = batch_of(ours, spoken())
    plain = ours.encode(batch).values
    encoder = ours.encoder
    assert isinstance(encoder, Wav2Vec2Encoder)
    encoder.masking = SpecAugmentConfig(time_masks=2, time_width=0.5, freq_masks=1, freq_width=8)
    assert torch.equal(ours.encode(batch).values, plain)
    ours.train()
    first, second = (ours.encode(batch).values for _ in range(2))
    assert not torch.equal(first, second)
    ours(batch).ctc.sum().backward()
    if encoder.mask_embedding is not None:
        assert encoder.mask_embedding.grad is not None
        assert encoder.mask_embedding.grad.abs().max() > 0
    encoder.masking = SpecAugmentConfig()
    assert torch.equal(ours.encode(batch).values, plain)
    ours.zero_grad(set_to_none=True)
    ours(batch).ctc.sum().backward()
    # The processes of a group wait for every gradient.
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_what_is_exported_is_loaded_with_the_same_transcripts(theirs, ours, kind, tmp_path):
    family, _ = KINDS[kind]
    pad = theirs.config.pad_token_id
    tokens = SpecialTokens(blank_id=0 if kind == "omniasr" else pad, pad_id=pad)
    assert export_model(ours, tmp_path, tokens) == CLASSES[family].name
    again, report = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    for example in spoken((14_005, 2_719)):
        assert_same(their_logits(again.eval(), example), their_logits(theirs, example), example.id)
    config, vocabulary, state = import_model(tmp_path)
    assert (config, vocabulary) == (ours.config, ours.vocab_size)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6, msg=name)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path)
    assert extractor.to_dict() == extractor_of(theirs).to_dict()


@pytest.mark.parametrize("name", ["Wav2Vec2ForPreTraining", "HubertModel", "WavLMModel"])
@torch.no_grad()
def test_a_pretrained_model_gives_its_encoder(name, tmp_path):
    theirs = make_pretrained(tmp_path, name)
    ours = ASRModel.from_state_dict(*import_model(tmp_path)).eval()
    (example,) = spoken((8_000,))
    values = extractor_of(theirs)(example.audio, sampling_rate=16_000, return_tensors="pt")
    expected = getattr(theirs, "wav2vec2", theirs)(values.input_values).last_hidden_state[0]
    result = ours.encode(batch_of(ours, [replace(example, text=[])], static=False)).values
    assert_same(result, expected, name)
    assert ours.vocab_size == 1


def test_weights_of_older_versions_are_the_same(tmp_path):
    model = make_wav2vec2(tmp_path, "base")
    expected = import_model(tmp_path)[2]
    weights = model.state_dict()
    for now, before in (("original0", "weight_g"), ("original1", "weight_v")):
        name = f"wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.{now}"
        weights[name.replace(f"parametrizations.weight.{now}", before)] = weights.pop(name)
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    state = import_model(tmp_path)[2]
    assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_lower_case": True},
        {
            "pad_token": "[PAD]",
            "unk_token": UNKNOWN,
            "word_delimiter_token": " ",
        },
    ],
)
def test_texts_are_those_of_their_tokenizer(tmp_path, settings):
    renamed = {"[PAD]": "<pad>", "[UNK]": "<unk>", " ": "|"} if len(settings) > 1 else {}
    names = {before: now for now, before in renamed.items()}
    vocabulary = {names.get(token, token): number for token, number in VOCABULARY.items()}
    write_tokenizer(tmp_path, {**vocabulary, "ING": len(vocabulary)}, **settings)
    theirs = transformers.Wav2Vec2CTCTokenizer.from_pretrained(tmp_path)
    load_tokenizer(tmp_path).save(tmp_path / "saved")
    ours = load_tokenizer(tmp_path / "saved")
    assert isinstance(ours, CharacterTokenizer)
    assert (ours.blank, ours.vocab_size) == (theirs.pad_token_id, len(vocabulary))
    # transformers loses a space beside a token of several characters.
    for text in ("hello world", "SINGINGS IN THE RAIN", "café Ω"):
        expected = theirs(text.upper()).input_ids
        ids = ours.encode(text, "en")
        assert [number + 1 for number in ids] == expected
        assert ours.count_unknown(ids) == text.count("Ω")
        told = theirs.decode(expected, group_tokens=False)
        assert ours.decode(ids) == told.replace(theirs.unk_token, "").strip()
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.get_vocab() == theirs.get_vocab()


@torch.no_grad()
@pytest.mark.parametrize("published", ["another blank", "late tokens", "no head"])
def test_the_vocabulary_of_a_published_folder(tmp_path, published):
    folder, out, vocabulary = tmp_path / "theirs", tmp_path / "ours", dict(VOCABULARY)
    if published == "no head":  # such as facebook/wav2vec2-base
        make_pretrained(folder, "Wav2Vec2ForPreTraining")
    else:
        theirs = make_wav2vec2(folder, "base")
    if published == "another blank":  # than that of config.json
        vocabulary |= {"<pad>": VOCABULARY["E"], "E": VOCABULARY["<pad>"]}
    if published == "late tokens":
        added = {f"<{n}>": len(VOCABULARY) + n for n in range(2)}
        (folder / "added_tokens.json").write_text(json.dumps(added))
    write_tokenizer(folder, vocabulary)
    assert main(["import", str(folder), str(out)]) == 0
    ours = load_model(out)
    if published == "no head":
        assert (ours.model.vocab_size, type(ours.tokenizer)) == (1, NoTokenizer)
        return
    (example,) = spoken((14_005,))
    logits = ours.model.ctc_logits(
        ours.model.encode(batch_of(ours.model, [example], static=False)).values
    )
    classes = logits.argmax(1).unique_consecutive()
    text = ours.tokenizer.decode(classes[classes < ours.model.vocab_size].tolist())
    processor = transformers.Wav2Vec2CTCTokenizer.from_pretrained(folder)
    values = extractor_of(theirs)(example.audio, sampling_rate=16_000, return_tensors="pt")
    assert text == processor.decode(theirs(values.input_values).logits[0].argmax(1)).strip()
    assert len(set(text)) > 3


@pytest.mark.parametrize(
    ("letters", "text", "expected"),
    [
        ("AEGORSTß", "Große Straße", "GROßE STRAßE"),
        ("AEGORST", "Große Straße", "GROSSE STRASSE"),
        ("aegorstß", "GROßE", "große"),
        ("AEaegorß", "Ea", "Ea"),
    ],
)
def test_the_case_of_a_vocabulary(tmp_path, letters, text, expected):
    names = ["<pad>", "<unk>", "|", *letters]
    write_tokenizer(tmp_path, {name: number for number, name in enumerate(names)})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text, "de")) == expected


def test_prepare_counts_the_frames_of_the_model(tmp_path):
    make_wav2vec2(tmp_path / "theirs", "base")
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "model")]) == 0
    soundfile.write(
        tmp_path / "a.wav", 0.1 * np.random.default_rng(0).standard_normal(32_000), 16_000
    )
    line = {"audio_filepath": "a.wav", "duration": 2.0, "text": "the rain in spain stays mainly"}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    tokenizer = ["--tokenizer", str(tmp_path / "model" / "tokenizer")]
    for options, code in (([], 0), (["--subsampling", "8"], 2)):
        out = tmp_path / f"data{code}"
        assert main(["prepare", str(tmp_path / "a.jsonl"), str(out), *tokenizer, *options]) == code
        assert ("ctc_infeasible" in (out / "dropped.jsonl").read_text()) == (code == 2)


def test_phonemes_are_refused_with_what_to_import(tmp_path):
    names = {name: n for n, name in enumerate(("<pad>", "<unk>", "ə", "i"))}
    write_tokenizer(tmp_path, names, tokenizer_class="Wav2Vec2PhonemeCTCTokenizer")
    with pytest.raises(ValueError, match=r"characters, but is of phonemes.*only pretrained"):
        load_tokenizer(tmp_path)


def test_a_language_of_mms_is_read(tmp_path):
    model = make_wav2vec2(tmp_path, "mms")
    languages = {"eng": VOCABULARY, "fra": {"<pad>": 0, "<unk>": 1, "|": 2, "é": 3, "a": 4}}
    write_tokenizer(tmp_path, languages, target_lang="eng")
    adapters = {name: x + 0.1 for name, x in model.state_dict().items() if "adapter" in name}
    adapters |= {"lm_head.weight": torch.randn(5, 32), "lm_head.bias": torch.randn(5)}
    save_file(adapters, tmp_path / "adapter.fra.safetensors")
    theirs = transformers.Wav2Vec2ForCTC.from_pretrained(
        tmp_path, target_lang="fra", ignore_mismatched_sizes=True
    )
    ours = ASRModel.from_state_dict(*import_model(tmp_path, "fra")).eval()
    (example,) = spoken((8_000,))
    logits = ours.ctc_logits(ours.encode(batch_of(ours, [example], static=False)).values)
    assert_same(logits, their_logits(theirs.eval(), example), "logits")
    tokenizer = CharacterTokenizer(tmp_path, "fra")
    assert tokenizer.decode(tokenizer.encode("a é", "fr")) == "a é"
    assert CharacterTokenizer(tmp_path).vocab_size == len(VOCABULARY) - 1
    with pytest.raises(ValueError, match=r"be one of its 2 languages .eng, fra., but is deu"):
        CharacterTokenizer(tmp_path, "deu")
    with pytest.raises(ValueError, match=r"`--language` must be fra for .*hf download"):
        import_model(tmp_path, "deu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv_dim": [16] * 6 + [8]}, "`config.conv_dim` must be one number 7 times"),
        ({"conv_stride": [4] * 7}, "`config.conv_stride` must be"),
        ({"pad_token_id": 99}, "`pad_token_id` must be in the vocabulary of 33"),
        ({"vocab_size": 40}, "`lm_head.weight` must have the 40 rows of `vocab_size`"),
        ({"num_conv_pos_embeddings": 15}, "`position_kernel` must be even"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, change, message):
    make_wav2vec2(tmp_path, "base")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        import_model(tmp_path)

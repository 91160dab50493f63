"""Models of Hugging Face come in, are trained on, and go out again."""

import json
import shutil

import pytest
import torch

from effasr.checkpoint import load_model, resolve
from effasr.model.language_prompt import LanguagePromptConfig
from tests.data.test_tokenizer import PROMPT_TOKENS, train_bpe
from tests.interop.test_moonshine import make_moonshine
from tests.interop.test_wav2vec2 import make_wav2vec2

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

ENCODER = {
    "model_type": "parakeet_encoder", "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 16, "num_mel_bins": 16,
    "subsampling_conv_channels": 4, "layerdrop": 0.0,
}  # fmt: skip
TEXTS = ["low middle high top"] * 4
CLASSES = 64
"""More than the tokenizer has tokens, as in models whose sizes were rounded up."""


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("canary")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    decoder = {
        "vocab_size": CLASSES, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64,
    }  # fmt: skip
    config = transformers.CanaryConfig(
        encoder_config=ENCODER, decoder_config=decoder, vocab_size=CLASSES
    )
    transformers.CanaryForConditionalGeneration(config).save_pretrained(folder)
    transformers.ParakeetFeatureExtractor(feature_size=16).save_pretrained(folder)
    train_bpe(TEXTS, PROMPT_TOKENS, 40).save(str(folder / "tokenizer.json"))
    return folder


def make_parakeet(folder, name, **options):
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = train_bpe(TEXTS, ["<unk>"], 40)
    blank = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<pad>" if name == "CTC" else "<blank>"])
    if name == "CTC":
        options["pad_token_id"] = blank
    else:
        options |= {"blank_token_id": blank, "decoder_hidden_size": 8}
    configuration = getattr(transformers, f"Parakeet{name}Config")
    config = configuration(encoder_config=ENCODER, vocab_size=blank + 1, **options)
    getattr(transformers, f"ParakeetFor{name}")(config).save_pretrained(folder)
    transformers.ParakeetFeatureExtractor(feature_size=16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_nemotron(folder):
    """One that is told the language; English, German, and what it hears itself."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = train_bpe(TEXTS, ["<unk>"], 40)
    blank = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<blank>"])
    encoder = {**ENCODER, "model_type": "nemotron_asr_streaming_encoder", "sliding_window": 6}
    config = transformers.Nemotron3_5AsrConfig(
        encoder_config={**encoder, "default_num_lookahead_tokens": 1}, vocab_size=blank + 1,
        blank_token_id=blank, decoder_hidden_size=8, num_prompts=4, prompt_intermediate_size=8,
        default_prompt_id=2,
    )  # fmt: skip
    transformers.Nemotron3_5AsrForRNNT(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    extractor = transformers.NemotronAsrStreamingFeatureExtractor(feature_size=16)
    languages = {"prompt_dictionary": {"en-US": 0, "de-DE": 1, "auto": 2}}
    settings = {"feature_extractor": extractor.to_dict(), **languages}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def tuned_and_out(effasr, tune, source, folder, recipe, language, name, *overrides):
    """Import, tune, export, and import again; the exported model and the first."""
    done = effasr("import", source, folder / "model")
    assert (done.code, done.err) == (0, "")
    # Letters of the corpus are missing in tokenizers that are as small as these.
    run = tune(folder / "model", recipe, language, "data.filters.max_unknown=1", *overrides)
    for _ in range(2):  # the second time over itself
        out = effasr("export", run, folder / "hf")
        assert out.code == 0, out.err
        assert "not exported" not in out.err
        assert f"load it with {name}.from_pretrained" in out.out
    loader = getattr(transformers, name)
    model, report = loader.from_pretrained(folder / "hf", output_loading_info=True)
    assert not any(report.values()), report
    file = "vocab.json" if (source / "vocab.json").is_file() else "tokenizer.json"
    tokenizers = [json.loads((x / file).read_text()) for x in (source, folder / "hf")]
    assert tokenizers[0] == tokenizers[1]
    assert effasr("import", folder / "hf", folder / "back").code == 0
    after = load_model(resolve(run)).model.state_dict()
    again = load_model(folder / "back").model.state_dict()
    if (positions := "encoder.positions.conv.weight") in after:
        # Its weight norm is multiplied out.
        torch.testing.assert_close(again.pop(positions), after.pop(positions))
    torch.testing.assert_close(again, after, rtol=0, atol=0)
    before = loader.from_pretrained(source)
    assert model.config.vocab_size == before.config.vocab_size
    return model, before


@pytest.mark.parametrize("recipe", ["finetune", "finetune_lora"])
def test_a_canary_in_tuned_and_out(effasr, tune, canary, tmp_path, recipe):
    name = "CanaryForConditionalGeneration"
    model, _ = tuned_and_out(effasr, tune, canary, tmp_path, recipe, "de", name)
    back = load_model(tmp_path / "back")
    assert back.model.vocab_size == CLASSES > back.tokenizer.vocab_size
    assert back.model.config.is_told_language(back.tokenizer.sources)
    start = PROMPT_TOKENS.index("<|startofcontext|>")
    assert model.generation_config.decoder_start_token_id == start


def test_a_model_of_cohere_in_tuned_and_out(effasr, tune, canary, tmp_path):
    decoder = {"hidden_size": 12, "head_dim": 6, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.CohereAsrConfig(
        **decoder, intermediate_size=20, vocab_size=CLASSES, encoder_config=ENCODER,
        max_position_embeddings=64,
    )  # fmt: skip
    name, source = "CohereAsrForConditionalGeneration", tmp_path / "source"
    shutil.copytree(canary, source)
    getattr(transformers, name)(config).save_pretrained(source)
    model, _ = tuned_and_out(effasr, tune, source, tmp_path, "finetune", "de", name)
    back = load_model(tmp_path / "back")
    tokenizer = back.tokenizer
    assert back.model.config.is_told_language(tokenizer.sources)
    assert tokenizer.pieces()[model.generation_config.decoder_start_token_id] == "▁"


@pytest.mark.parametrize("name", ["RNNT", "TDT", "CTC"])
def test_a_parakeet_in_tuned_and_out(effasr, tune, tmp_path, name):
    source = make_parakeet(tmp_path / "source", name)
    models = tuned_and_out(effasr, tune, source, tmp_path, "finetune", "en", f"ParakeetFor{name}")
    assert not torch.equal(*(model.encoder.subsampling.linear.weight for model in models))


def test_a_nemotron_with_prompts_in_tuned_and_out(effasr, tune, workplace, tmp_path):
    source, name = make_nemotron(tmp_path / "source"), "Nemotron3_5AsrForRNNT"
    models = tuned_and_out(effasr, tune, source, tmp_path, "finetune", "de", name)
    assert not torch.equal(*(model.prompt_projector.linear_1.weight for model in models))
    languages = {"en-US": 0, "de-DE": 1, "auto": 2}
    config = load_model(tmp_path / "back").model.config
    assert config.is_told_language(())
    prompt = config.language_prompt
    assert prompt == LanguagePromptConfig(languages=languages, count=4, width=8)
    arguments = "transcribe", "--run", tmp_path / "model", workplace.wav
    texts = {lang: effasr(*arguments, "--language", lang).out for lang in ("en", "de", "auto")}
    assert effasr(*arguments).out == texts["auto"]
    assert len(set(texts.values())) == 3
    failed = effasr(*arguments, "--language", "fr")
    assert "must be one of en-US, de-DE, auto, but is 'fr'" in failed.err
    (source / "processor_config.json").unlink()
    failed = effasr("import", source, tmp_path / "other")
    assert "copy processor_config.json of the model, too" in failed.error


@pytest.mark.parametrize("kind", ["base", "mms", "hubert", "omniasr", "wavlm"])
def test_a_wav2vec2_in_tuned_and_out(effasr, tune, tmp_path, kind):
    source, recipe = tmp_path / "source", "finetune_wav2vec2"
    name = type(make_wav2vec2(source, kind)).__name__
    settings = "data.frame_budget=1000", "model.spec_augment.time_masks=0"
    settings += "model.spec_augment.freq_masks=0", "model.spec_augment.freq_width=27"
    models = tuned_and_out(effasr, tune, source, tmp_path, recipe, "en", name, *settings)
    parts = [getattr(model, model.base_model_prefix) for model in models]
    # The convolutions are frozen.
    endings = "conv_layers.2.conv.weight", ".projection.weight"
    weights = [x.named_parameters() for x in parts]
    ends = [{name: x for name, x in part if name.endswith(endings)}.values() for part in weights]
    frozen, trained = zip(*ends, strict=True)
    assert torch.equal(*frozen)
    assert not torch.equal(*trained)


def test_a_moonshine_in_tuned_and_out(effasr, tune, tmp_path):
    source, name = tmp_path / "source", "MoonshineForConditionalGeneration"
    make_moonshine(source)
    train_bpe(TEXTS, ["<unk>", "<s>", "</s>"], 40).save(str(source / "tokenizer.json"))
    settings = "data.frame_budget=300", "model.spec_augment.freq_masks=0"
    models = tuned_and_out(effasr, tune, source, tmp_path, "finetune", "en", name, *settings)
    assert not torch.equal(*(model.model.encoder.conv1.weight for model in models))
    config = json.loads((source / "config.json").read_text())
    for change, message in (
        ({"model_type": "moonshine_streaming"}, "a streaming Moonshine is not read"),
        ({"partial_rotary_factor": 0.6, "rope_parameters": None}, "must rotate an even number"),
    ):
        (source / "config.json").write_text(json.dumps(config | change))
        assert message in effasr("import", source, tmp_path / "other").error


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "has no config.json: `hf download"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("model.safetensors", None, "model.safetensors: there is no such file."),
        ("tokenizer.json", None, "tokenizer.json: there is no such file."),
        ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer that can be read"),
    ],
)
def test_what_cannot_be_imported(effasr, canary, tmp_path, name, content, message):
    source = shutil.copytree(canary, tmp_path / "source")
    if content is None:
        (source / name).unlink()
    else:
        (source / name).write_text(content)
    failed = effasr("import", source, tmp_path / "out")
    assert failed.code == 2
    assert message in failed.error
    assert not (tmp_path / "out").exists()


def test_another_models_tokenizer_is_refused(effasr, canary, tmp_path):
    source = shutil.copytree(canary, tmp_path / "source")
    content = json.loads((source / "tokenizer.json").read_text())
    content["model"]["vocab"]["zzz"] = 99
    (source / "tokenizer.json").write_text(json.dumps(content))
    assert "must be the model's" in effasr("import", source, tmp_path / "out").error


def test_a_folder_with_something_else_in_it_is_not_replaced(effasr, canary, tmp_path):
    (tmp_path / "diary.txt").write_text("dear")
    failed = effasr("import", canary, tmp_path)
    assert "must be new, empty or a model directory" in failed.error
    assert (tmp_path / "diary.txt").read_text() == "dear"

"""Models of Hugging Face come in, are trained on, and go out again."""

import json
import shutil

import numpy as np
import pytest
import soundfile
import torch

from effasr.checkpoint import load_model, resolve, save_model
from effasr.decoding.config import DecodingConfig

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

PROMPT_TOKENS = [
    *("<unk>", "<pad>", "<|endoftext|>", "<|startofcontext|>", "<|startoftranscript|>"),
    *("<|emo:undefined|>", "<|pnc|>", "<|nopnc|>", "<|noitn|>", "<|notimestamp|>"),
    *("<|nodiarize|>", "<|de|>", "<|en|>"),
]
ENCODER = {
    "model_type": "parakeet_encoder", "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 16, "num_mel_bins": 16,
    "subsampling_conv_channels": 4, "layerdrop": 0.0,
}  # fmt: skip
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
    make_tokenizer(PROMPT_TOKENS).save(str(folder / "tokenizer.json"))
    return folder


def make_tokenizer(specials):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=40, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(["low middle high top"] * 4, trainer)
    return tokenizer


def make_parakeet(folder, name, **options):
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = make_tokenizer(["<unk>"])
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


def tuned_and_out(effasr, tune, source, folder, recipe, language, name):
    """Import, tune, export, and import again; the exported model and the first."""
    done = effasr("import", source, folder / "model")
    assert (done.code, done.err) == (0, "")
    # Letters of the corpus are missing in tokenizers that are as small as these.
    run = tune(folder / "model", recipe, language, "data.filters.max_unknown=1")
    for _ in range(2):  # the second time over itself
        out = effasr("export", run, folder / "hf")
        assert out.code == 0, out.err
        assert "not exported" not in out.err
        assert f"load it with {name}.from_pretrained" in out.out
    loader = getattr(transformers, name)
    model, report = loader.from_pretrained(folder / "hf", output_loading_info=True)
    assert not any(report.values()), report
    tokenizers = [json.loads((x / "tokenizer.json").read_text()) for x in (source, folder / "hf")]
    assert tokenizers[0] == tokenizers[1]
    assert effasr("import", folder / "hf", folder / "back").code == 0
    after = load_model(resolve(run)).model.state_dict()
    again = load_model(folder / "back").model.state_dict()
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
    start = PROMPT_TOKENS.index("<|startofcontext|>")
    assert model.generation_config.decoder_start_token_id == start


@pytest.mark.parametrize("name", ["RNNT", "TDT", "CTC"])
def test_a_parakeet_in_tuned_and_out(effasr, tune, tmp_path, name):
    source = make_parakeet(tmp_path / "source", name)
    models = tuned_and_out(effasr, tune, source, tmp_path, "finetune", "en", f"ParakeetFor{name}")
    assert not torch.equal(*(model.encoder.subsampling.linear.weight for model in models))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "has no config.json: `hf download"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", '{"model_type": "wav2vec2"}', "canary or parakeet_ctc or parakeet_rnnt"),
        ("model.safetensors", None, "model.safetensors: there is no such file."),
        ("model.safetensors", "garbage", "model.safetensors is damaged"),
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
    failed = effasr("import", source, tmp_path / "out")
    assert "must be the model's" in failed.error


def test_a_folder_with_something_else_in_it_is_not_replaced(effasr, canary, tmp_path):
    (tmp_path / "diary.txt").write_text("dear")
    failed = effasr("import", canary, tmp_path)
    assert "must be new, empty or a model directory" in failed.error
    assert (tmp_path / "diary.txt").read_text() == "dear"


@torch.no_grad()
def test_transcripts_are_those_of_transformers(effasr, canary, tmp_path):
    """Random weights, so large that the text depends on the sound and on what was said before."""
    assert effasr("import", canary, tmp_path / "model").code == 0
    loaded = load_model(tmp_path / "model")
    draw = torch.Generator().manual_seed(1)
    for name, weight in loaded.model.named_parameters():
        if weight.ndim > 1:
            scale = 3.0 if "decoder" in name else 1.0
            deviation = scale * weight[0].numel() ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=draw) * deviation)
    save_model(tmp_path / "model", loaded.model, loaded.tokenizer, loaded.prompt)
    noise = np.random.default_rng(0).standard_normal((8, 12_000)).astype(np.float32)
    noise *= 0.1 * np.linspace(0, 1, 12_000, dtype=np.float32) ** np.arange(8)[:, None]
    files = [tmp_path / f"{number}.wav" for number in range(8)]
    for file, sound in zip(files, noise, strict=True):
        soundfile.write(file, sound, 16_000, subtype="FLOAT")
    command = ("transcribe", "--run", tmp_path / "model", "--method", "attention")
    done = effasr(*command, *files)
    assert done.code == 0, done.err
    ours = [line.split("\t")[1] for line in done.out.splitlines()]
    assert len(set(ours)) > 3, ours
    assert sum(len(set(text)) > 2 for text in ours) > 2, ours

    assert effasr("export", tmp_path / "model", tmp_path / "hf").code == 0
    model = transformers.CanaryForConditionalGeneration.from_pretrained(tmp_path / "hf").eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path / "hf")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    prompt = loaded.tokenizer.prompt(loaded.prompt)
    theirs = []
    for sound in noise:
        inputs = extractor(sound, sampling_rate=16_000, return_tensors="pt")
        frames = loaded.model.config.features.encoder_frames(len(sound))
        tokens = model.generate(
            **inputs,
            decoder_input_ids=torch.tensor([prompt]),
            do_sample=False,
            num_beams=1,
            max_new_tokens=min(DecodingConfig().max_tokens(frames), 64 - len(prompt)),
        )
        spoken = tokens[0, len(prompt) :].tolist()
        # transformers is told of the classes that are no tokens.
        assert max(spoken) < loaded.tokenizer.vocab_size < CLASSES
        theirs.append(tokenizer.decode(spoken, skip_special_tokens=True).strip())
    assert ours == theirs

"""Whisper models go to CTranslate2, as faster-whisper reads them, and come back."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

from effasr.checkpoint import load_model, resolve, save_model
from effasr.data.prompt import Prompt
from effasr.interop.huggingface import ctranslate2 as module
from effasr.interop.huggingface.checkpoint import import_model
from tests.cli.conftest import write_rows
from tests.interop.whisper import EOS, transformers

package = pytest.importorskip("ctranslate2")


@pytest.fixture
def imported(effasr, whisper_checkpoint, tmp_path):
    assert effasr("import", whisper_checkpoint, tmp_path / "imported").code == 0
    return tmp_path / "imported"


def export(effasr, imported, out, quantization):
    command = ("export", imported, out, "--format", "ctranslate2", "--quantization", quantization)
    return effasr(*command)


@pytest.mark.parametrize("quantization", ["float32", "float16", "bfloat16"])
def test_there_and_back(effasr, imported, whisper_checkpoint, tmp_path, quantization):
    out = tmp_path / "out"
    done = export(effasr, imported, out, quantization)
    assert done.code == 0, done
    assert {path.name for path in out.iterdir()} >= {"model.bin", "config.json", "tokenizer.json"}
    assert effasr("import", out, tmp_path / "back").code == 0
    before = load_file(imported / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    dtype = getattr(torch, quantization)
    for name, value in before.items():
        # Positions and norms are not quantized in each version of the package.
        assert torch.equal(after[name], value) or torch.equal(after[name], value.to(dtype).float())
    assert load_model(tmp_path / "back").model.config == load_model(imported).model.config


def test_a_tuned_model_gives_the_same_text_in_all_formats(effasr, imported, tmp_path):
    wave = 0.1 * np.random.default_rng(1).standard_normal(16_000).astype(np.float32)
    audio = tmp_path / "a.wav"
    soundfile.write(audio, wave, 16_000, subtype="FLOAT")
    line = {"audio_filepath": str(audio), "duration": 1.0, "text": "low high"}
    write_rows(tmp_path / "manifest.jsonl", [line])
    tuned = effasr(
        "train", "finetune_whisper", f"init_from={imported}", f"output={tmp_path}", "name=tuned",
        f"data.train={tmp_path / 'manifest.jsonl'}", "data.validation=[]", "data.workers=0",
        "data.frame_budget=210", "training.device=cpu", "schedule.warmup_steps=0",
        "training.max_steps=2", "optimizer.lr=1e-3",
    )  # fmt: skip
    assert tuned.code == 0, tuned
    run, loaded = tmp_path / "tuned", load_model(resolve(tmp_path / "tuned"))
    ours = effasr("transcribe", run, audio, "--json", "--no-fallback")
    texts = {"effasr": json.loads(ours.out)["text"]}
    for kind in ("huggingface", "ctranslate2", "onnx"):
        assert effasr("export", run, tmp_path / kind, "--format", kind).code == 0
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(tmp_path / "huggingface")
    mel = extractor(wave, sampling_rate=16_000, return_tensors="np").input_features
    prompt = loaded.tokenizer.prompt(Prompt())
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "huggingface")
    ids = theirs.eval().generate(
        torch.from_numpy(mel), decoder_input_ids=torch.tensor([prompt]), max_length=40
    )[0]
    texts["huggingface"] = loaded.tokenizer.decode(ids.tolist())
    model = package.models.Whisper(str(tmp_path / "ctranslate2"), compute_type="float32")
    (result,) = model.generate(
        package.StorageView.from_array(mel), [prompt], beam_size=1, max_length=40
    )
    ids = [token for token in result.sequences_ids[0] if token != EOS]
    assert len(ids) > 10
    texts["ctranslate2"] = loaded.tokenizer.decode(ids)
    command = [sys.executable, tmp_path / "onnx" / "infer.py", audio]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    texts["onnx"] = printed.partition("\t")[2]
    # CTranslate2 takes half of the positions at most.
    shortest = min(texts.values(), key=len).strip()
    assert {kind: text.strip()[: len(shortest)] for kind, text in texts.items()} == dict.fromkeys(
        texts, shortest
    )
    assert (
        loaded.model.state_dict()["decoder.embed_tokens.weight"]
        .ne(load_model(imported).model.state_dict()["decoder.embed_tokens.weight"])
        .any()
    )


def test_quantized_and_damaged_models_are_named(effasr, imported, tmp_path):
    assert export(effasr, imported, tmp_path / "int8", "int8").code == 0
    failed = effasr("import", tmp_path / "int8", tmp_path / "back")
    assert failed.code == 2
    assert "quantized to int8" in failed.error
    assert export(effasr, imported, tmp_path / "out", "float16").code == 0
    content = (tmp_path / "out" / "model.bin").read_bytes()
    for size in (*range(20, 60), len(content) // 2, len(content) - 200):
        (tmp_path / "out" / "model.bin").write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"model.bin is damaged: it ends within a variable"):
            import_model(tmp_path / "out")
    (tmp_path / "out" / "model.bin").write_bytes(b"\x63" + content[1:])
    with pytest.raises(ValueError, match="must be of version 5 to 6"):
        import_model(tmp_path / "out")


def test_what_cannot_be_exported_is_refused_before_anything_is_written(
    effasr, imported, workplace, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    failed = export(effasr, workplace.run, out, "int8")
    assert (failed.code, out.exists()) == (2, False)
    assert (
        "must have a Whisper, but this model has an encoder of kind fastconformer" in failed.error
    )
    # faster-whisper cannot write the prompt of another tokenizer; the card of transformers has it.
    loaded, tokenizer = load_model(imported), load_model(resolve(workplace.run)).tokenizer
    save_model(tmp_path / "other", loaded.model, tokenizer, loaded.prompt)
    failed = export(effasr, tmp_path / "other", out, "int8")
    assert (failed.code, out.exists()) == (2, False)
    assert "must have the tokenizer of a Whisper" in failed.error
    assert "the prompt in README.md" in effasr("export", tmp_path / "other", tmp_path / "hf").out
    assert f"[{tokenizer.prompt(loaded.prompt)}]" in (tmp_path / "hf" / "README.md").read_text()
    failed = effasr("export", imported, out, "--quantization", "int8")
    assert "`--quantization` must be left out for `--format huggingface`" in failed.error
    finder = SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr(module, "importlib", SimpleNamespace(util=finder))
    failed = export(effasr, imported, out, "int8")
    assert (failed.code, out.exists()) == (1, False)
    assert "pip install 'effasr[ctranslate2]'" in failed.error

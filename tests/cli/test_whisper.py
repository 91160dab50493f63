"""A Whisper of Hugging Face's comes in, transcribes, is fine-tuned, and goes out again."""

import json
import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from effasr.checkpoint import follow, load_model, resolve
from effasr.data.prompt import Prompt
from effasr.training.run_dir.run_directory import read_lines
from tests.cli.conftest import write_rows
from tests.interop.whisper import EOS, SECONDS, make_whisper, transformers


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    lines = []
    for number, seconds in enumerate((1.5, 0.4, 1.9, 0.7, 1.1, 2.3)):
        path = folder / f"{number}.wav"
        soundfile.write(path, 0.1 * random.standard_normal(int(16_000 * seconds)), 16_000)
        lines.append({"audio_filepath": str(path), "duration": seconds, "text": "low high"})
    write_rows(folder / "manifest.jsonl", lines)
    return folder


@pytest.fixture
def settings(effasr, whisper_checkpoint, corpus, tmp_path):
    """Of a fine-tuning of the imported model, in which every step counts."""
    assert effasr("import", whisper_checkpoint, tmp_path / "imported").code == 0
    return [
        f"init_from={tmp_path}/imported", f"data.train={corpus / 'manifest.jsonl'}",
        "data.workers=0", f"output={tmp_path}", "data.frame_budget=210", "training.device=cpu",
        "schedule.warmup_steps=0",
    ]  # fmt: skip


@pytest.mark.parametrize(("joined", "count"), [(0.0, 6), (60.0, 1)])
def test_the_timing_of_transcribers(settings, corpus, tmp_path, joined, count):
    script = runpy.run_path(str(Path(__file__).parents[2] / "profiling" / "transcribers.py"))
    figures = tmp_path / "figures.json"
    line = ["effasr", tmp_path / "imported", corpus / "manifest.jsonl", "--output", figures]
    script["main"]([*map(str, line), f"--window={SECONDS}", f"--joined={joined}"])
    content = json.loads(figures.read_text())
    assert content["recordings"] == len(content["transcripts"]) == count
    # A pause of 0.3 to 2 s lies between each two.
    least = 7.9 if joined == 0 else 9.4
    assert least <= content["audio_s"] < least + 10 * (joined > 0) + 0.1
    assert content["cpu_s"] > 0
    assert 0 < content["wer"] < 40


def test_the_trainer_of_transformers_is_run_for_seconds(
    effasr, whisper_checkpoint, corpus, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("accelerate", reason="Seq2SeqTrainer needs it")
    source, end = shutil.copytree(whisper_checkpoint, tmp_path / "source"), "<|endoftext|>"
    tokens = {f"{name}_token": end for name in ("pad", "bos", "eos", "unk")}
    settings = json.dumps({"tokenizer_class": "WhisperTokenizer", **tokens})
    (source / "tokenizer_config.json").write_text(settings)
    scripts = Path(__file__).parents[2] / "profiling"
    monkeypatch.syspath_prepend(scripts)
    line = [source, corpus / "manifest.jsonl", tmp_path / "out", "--language=de", "--cpu-s=0.1"]
    monkeypatch.setattr("sys.argv", ["seq2seq_trainer", *map(str, line), "--lr=1e-3"])
    runpy.run_path(str(scripts / "seq2seq_trainer.py"))["main"]()
    assert re.search(r"\d+ steps of 8 utterances: \d+ s of a core", capsys.readouterr().out)
    assert effasr("import", tmp_path / "out", tmp_path / "tuned").code == 0
    weights = [load_model(tmp_path / "tuned").model.state_dict()["decoder.embed_tokens.weight"]]
    weights.append(make_whisper(source).model.decoder.embed_tokens.weight)
    assert not torch.equal(*weights)


def test_from_hugging_face_and_back(
    effasr, whisper_checkpoint, corpus, settings, tmp_path, caplog, monkeypatch
):
    imported, out = tmp_path / "imported", tmp_path / "exported"
    audio = corpus / "0.wav"
    message = effasr("transcribe", "--run", imported, audio, "--json", "--no-fallback")
    assert message.code == 0, message
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(whisper_checkpoint).eval()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(whisper_checkpoint)
    loaded = load_model(imported)
    wave = soundfile.read(audio, dtype="float32")[0]
    features = extractor(wave, sampling_rate=16_000, return_tensors="pt").input_features
    prompt = torch.tensor([loaded.tokenizer.prompt(Prompt())])
    ids = theirs.generate(features, decoder_input_ids=prompt, max_length=40)[0].tolist()
    assert json.loads(message.out)["text"] == loaded.tokenizer.decode(ids)
    assert json.loads(message.out)["text"]

    settings += [
        f"data.validation={corpus / 'manifest.jsonl'}", "name=tuned", "training.max_steps=3",
        "training.validate_every=3", "training.checkpoint_every=3", "optimizer.lr=1e-3",
    ]  # fmt: skip
    trained = effasr("train", "finetune_whisper", *settings, "model.features.minimum_s=0")
    assert trained.code == 0, trained
    warning = "5 of 5 utterances name no language, and are prompted as 'en'"
    assert warning in caplog.text
    assert "or set data.language=en." in caplog.text
    logged = len(caplog.records)
    stated = ("name=stated", "data.language=en", "data.validation=[]", "training.max_steps=1")
    assert effasr("train", "finetune_whisper", *settings, *stated).code == 0
    assert not any(warning in record.getMessage() for record in caplog.records[logged:])
    run = tmp_path / "tuned"
    # The error rate before is that of the model as it was: with its silence, and never the best.
    assert "step 0 is validated with silence up to 2 s" in trained.err
    evaluated = effasr("evaluate", imported, corpus / "manifest.jsonl", "--output", tmp_path / "of")
    assert evaluated.code == 0, evaluated
    rows = read_lines(run / "validation.jsonl")
    assert [row["step"] for row in rows] == [0, 3]
    assert rows[0]["cer"] == json.loads((tmp_path / "of/wer.json").read_text())["cer"]
    assert follow(run / "checkpoints/best") == run / "checkpoints/step_00000003"
    is_worse = rows[1]["wer"] >= rows[0]["wer"]
    assert ("no validation was better than the WER of" in caplog.text) == is_worse
    (dropped,) = read_lines(run / "dropped.jsonl")
    # 2.3 s are more than this model can read.
    assert (Path(dropped["audio"]).name, dropped["reason"]) == ("5.wav", "over_model_length")
    tuned = load_model(resolve(run))
    before, config = loaded.model.config, tuned.model.config
    assert config.features.minimum_s == 0
    assert (config.encoder, config.decoder) == (before.encoder, before.decoder)
    # Shorter by far than with silence up to 2 s each.
    frames = [config.features.encoder_frames(int(16_000 * s)) for s in (1.5, 0.4, 1.9, 0.7, 1.1)]
    assert sum(frames) == 280

    exported = effasr("export", run, out)
    assert exported.code == 0, exported
    assert "WhisperForConditionalGeneration" in exported.out
    assert "pads every utterance to 2 s" in caplog.text
    model = transformers.WhisperForConditionalGeneration.from_pretrained(out)
    state = tuned.model.state_dict()["decoder.embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight, state)
    assert not torch.equal(state, loaded.model.state_dict()["decoder.embed_tokens.weight"])
    generation = model.generation_config
    assert generation.suppress_tokens == [1, 2, 7, *range(EOS + 1, EOS + 10)]
    assert generation.begin_suppress_tokens == [220, EOS]
    assert generation.lang_to_id["<|de|>"] == EOS + 3
    assert generation.alignment_heads == [[0, 1], [1, 0]]
    assert generation.max_initial_timestamp_index == 50
    timed = model.generate(features, return_token_timestamps=True, max_new_tokens=4)
    assert "token_timestamps" in timed
    read = transformers.AutoTokenizer.from_pretrained(out)
    assert read.decode(loaded.tokenizer.encode("low high", "en")) == " low high"
    # The lines of the model card run where it is.
    soundfile.write(out / "recording.wav", wave, 16_000)
    (lines,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(out)
    exec(lines, {})
    # What the run began from may be gone when it goes on.
    shutil.rmtree(imported)
    further = ("model.features.minimum_s=0", "training.max_steps=6")
    assert effasr("train", "finetune_whisper", *settings, *further).code == 0
    assert [row["step"] for row in read_lines(run / "validation.jsonl")] == [0, 3, 6]


@pytest.mark.parametrize(
    "command",
    [
        "transcribe MODEL MANIFEST", "evaluate MODEL MANIFEST", "export MODEL out",
        "init MANIFEST --init-from MODEL --no-timing",
    ],
)  # fmt: skip
def test_a_model_that_was_not_imported_is_refused_with_the_line_that_imports_it(
    command, effasr, whisper_checkpoint, corpus, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    paths = {"MODEL": whisper_checkpoint, "MANIFEST": corpus / "manifest.jsonl"}
    failed = effasr(*(paths.get(word, word) for word in command.split()))
    assert failed.code == 2, failed
    line = failed.error.partition("`effasr ")[2].partition("`")[0]
    assert effasr(*line.split()).code == 0
    assert resolve(line.split()[-1])


def test_alignment_heads_of_another_model_are_left_out_with_a_warning(
    effasr, whisper_checkpoint, tmp_path, caplog
):
    folder = shutil.copytree(whisper_checkpoint, tmp_path / "copy")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "alignment_heads": [[5, 0]]}))
    assert effasr("import", folder, tmp_path / "imported").code == 0
    assert "`alignment_heads` of generation_config.json is not exported again" in caplog.text
    assert load_model(tmp_path / "imported").model.config.decoder.alignment_heads == ()


def test_a_plan_tells_how_much_is_silence(effasr, whisper_checkpoint, corpus, tmp_path):
    imported, recipe = tmp_path / "imported", tmp_path / "recipe.yaml"
    assert effasr("import", whisper_checkpoint, imported).code == 0
    recipe.write_text(f"init_from: {imported}\ndata: {{frame_budget: 400}}\n")
    plan = ("plan", "--recipe", recipe, "--manifest", corpus / "manifest.jsonl", "--world-size", 1)
    done = effasr(*plan)
    assert done.code == 0, done
    # Of 5 utterances that last 5.6 s together; the sixth is too long for the model.
    assert "each 400 frames (8 s)" in done.out
    assert "44.0 % of the encoder frames are silence" in done.out
    assert "over_model_length 1" in done.out
    recipe.write_text(recipe.read_text() + "model: {features: {minimum_s: 0}}\n")
    assert "silence" not in effasr(*plan).out


def test_another_window_is_that_of_the_changed_model(effasr, whisper_checkpoint, corpus, tmp_path):
    imported, shorter = tmp_path / "imported", tmp_path / "shorter"
    assert effasr("import", whisper_checkpoint, imported).code == 0
    shutil.copytree(imported, shorter)
    description = (shorter / "model.yaml").read_text()
    assert "minimum_s: 2.0" in description
    (shorter / "model.yaml").write_text(description.replace("minimum_s: 2.0", "minimum_s: 1.0"))
    audio = [corpus / f"{number}.wav" for number in (1, 3, 4)]
    expected = effasr("transcribe", "--run", shorter, *audio, "--no-fallback").out
    given = effasr("transcribe", "--run", imported, *audio, "--no-fallback", "--window", 1)
    assert given.out == expected != effasr("transcribe", "--run", imported, *audio).out
    failed = effasr("transcribe", "--run", imported, *audio, "--window", 3)
    assert (
        "`--window` must be at most 2 s, the longest that the model reads, but is 3" in failed.error
    )


def test_timestamps_that_a_tokenizer_does_not_list_stay_possible(
    effasr, whisper_checkpoint, tmp_path
):
    """As in the tokenizer.json of some folders of faster-whisper."""
    folder, out = tmp_path / "folder", tmp_path / "out"
    shutil.copytree(whisper_checkpoint, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    stamps = [x["id"] for x in added if "." in x["content"]]
    tokenizer["added_tokens"] = [x for x in added if x["id"] not in stamps]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert effasr("import", folder, tmp_path / "imported").code == 0
    assert effasr("export", tmp_path / "imported", out).code == 0
    suppressed = json.loads((out / "generation_config.json").read_text())["suppress_tokens"]
    assert len(stamps) > 50
    assert not {*stamps} & {*suppressed}
    assert suppressed == [1, 2, 7, *range(EOS + 1, EOS + 10)]

"""Command lines that are refused: the exit code 2, and one line that says what to do."""

import json
import shlex

import pytest
import torch

NO_GPU = "PyTorch sees no GPU. Use cpu or auto."
ARGUMENTS = [
    ("trian", "effasr: 'trian' is no command: did you mean train? (see effasr --help)"),
    ("plan --strateg all", "unrecognized arguments: --strateg: did you mean --strategy? (see "),
    ("evaluate a --beam 2 b c", "effasr evaluate: unrecognized arguments: c (see "),
    ("export x s3://b/out", "`out` must be a path on this machine, but is the URL s3://b/out: "),
    ("train s3://b/a.yaml", "`recipe` must be a path on this machine, but is the URL s3://b/a.ya"),
    (
        "train small output=https://me:secret@b/x?sig=1",
        "https://b/x: a URL must have neither a password nor a query such as a signature",
    ),
    ("train small data.train=[zip::s3://b/x]", "zip::s3://b/x: a URL must be of a store or a s"),
    ("train", "effasr train: the following arguments are required: RECIPE (see "),
    ("evaluate --run x", "effasr evaluate: the following arguments are required: MANIFEST (see "),
    ("doctor --fast", "effasr doctor: unrecognized arguments: --fast (see "),
    ("transcribe --ru x f", "effasr transcribe: unrecognized arguments: --ru: did you mean --run?"),
    ("prepare a b --jobs 0", "effasr prepare: argument --jobs: must be an int"),
    ("prepare a b --max-duration 0", "--max-duration: must be seconds above 0"),
    ("demo-data a --utterances 7", "effasr demo-data: argument --utterances: must"),
    ("tokenizer {train} {tmp}/t --vocab-size some", "must be an integer"),
    (
        "tokenizer {train} {tmp}/t --shared --vocab-size auto",
        "`--vocab-size` must be a number with --shared",
    ),
]
RECIPES = [
    ("show", "`RECIPE` must be one of add_language, canary_180m_flash, "),
    ("copy smal", "but is 'smal'"),
    ("list small", "must have no further arguments"),
    ("show small mine.yaml", "must have no further arguments"),
    ("copy small mine.txt", "that ends in .yaml"),
]
INIT = [
    ("{train} --output {taken}", "must be a new file"),
    ("{train} --output {tmp}/x.json", "must be a new file"),
    (
        "{train} --init-from {run} --tokenizer {tok} --output {tmp}/n.yaml",
        "must be left out with --init-from",
    ),
    ("{train} --head ctc --output {tmp}/n.yaml", "`--head` must be left out without --init-from"),
    ("{empty} --output {tmp}/n.yaml", "no utterances to write a recipe for"),
    ("{train} --dev {empty} --output {tmp}/n.yaml", "no utterances to validate on"),
    ("{tmp}/gone.jsonl --output {tmp}/n.yaml", "there is no such file"),
]
PLAN = [
    ("", "`MANIFEST` must name a manifest or a list, but is not given"),
    ("--manifest gone", "gone: there is no such file or folder"),
    ("--manifest {empty}", "no utterance can be planned (0 dropped)"),
    ("--manifest {long}", "no utterance can be planned (1 dropped; the f"),
    ("--manifest {bad}", "bad.jsonl:2: not valid JSON"),
    ("--manifest {dev} --strategy best", "argument --strategy: invalid choice: 'best'"),
    ("--manifest {dev} --world-size 0", "--world-size: must be an integer from 1 on, but is '0'"),
    ("--manifest {dev} --epochs -1", "argument --epochs: must be an integer from 1 on"),
    ("--manifest {dev} --frame-budget 9999999999", "--frame-budget: must be an integer from 1 on"),
    ("--manifest {dev} --seed ²", "argument --seed: must be an integer from 0 on"),
    ("--manifest {dev} --max-duration nan", "--max-duration: must be seconds above 0"),
    ("--manifest {dev} --max-duration -1", "--max-duration: must be seconds above 0"),
    ("--manifest {dev} --recipe nope", "`recipe` must be a YAML file or a recipe's name"),
    ("--manifest {dev} --tokenizer gone", "effasr tokenizer"),
    ("--manifest {dev} --picture p.png", "must be a file that ends in .svg, but is 'p.png'"),
    ("--manifest {dev} --picture gone/p.svg", "`--picture` must be in a folder that exists"),
    ("--manifest {dev} --dropped d.txt", "`--dropped` must be a file that ends in .jsonl"),
    ("{dev} --tflops 3", "`--tflops` must be given with `--what-if`, but is 3."),
    ("{dev} --what-if --strategy all", "`--strategy` must be left out with `--what-if`"),
    ("{dev} --what-if --calibration {other}", "must be a file of `effasr calibrate`"),
]
CALIBRATE = [
    ("--target-share 1.5", "`target_share` must be above 0 and at most 1"),
    ("--target-bytes 9e9x", "`calibration.target_bytes` must be an integer or null"),
    ("--objective speed", "argument --objective: invalid choice: 'speed'"),
    ("data.frames=3", "`data.frames` is an unknown field"),
]
TRAIN = [
    ("model.encoder.layrs=3", "unknown field: did you mean `layers`?"),
    ("model.ctc=1", "`model.ctc` must be true or false, but is 1"),
    ("optimizer.lr=.nan", "`optimizer.lr` must be a finite number, but is nan"),
    (
        "training.precision=half",
        "must be one of 'auto', 'float32', 'bfloat16', 'float16', but is 'half'",
    ),
    ("model.encoder.heads=3", "model.encoder: `width` must be a multiple of"),
    ("model.encoder.subsampling=6", "`subsampling` must be 4 or 8, but is 6"),
    ("name", "an override must be `path.to.field=value`, but is 'name'"),
    ("--name", "an override must be `path.to.field=value`, but is '--name'"),
    ("name=a/b", "`name` must be usable as a folder's name"),
    ("data.train=gone.jsonl", "gone.jsonl: there is no such file or folder"),
    ("data.train=[]", "`data.train` must name at least one manifest"),
    ("data.validation=gone.jsonl", "gone.jsonl: there is no such file or folder"),
    ("data.tokenizer=gone", "train a tokenizer with `effasr tokenizer MANIFEST OUT`"),
    ("\"data.tokenizer=''\"", "`data.tokenizer` must be a folder that `effasr tokenizer` wrote"),
    ("evaluation.normalizer=nope", "must be one of none, basic, whisper_english, open_asr_lea"),
    ("init_from=gone", "gone must be a model directory or a run with a checkpoint"),
    ("training.device=tpu", "`training.device` must be one of 'auto', 'cpu', 'cuda'"),
    ("training.device=cuda", NO_GPU),
    *(
        (f"init_from={{run}} \"data.tokenizer=''\" model.encoder.{change}", message)
        for change, message in (
            ("subsampling=4", '"encoder.subsampling.depthwise2.weight"'),
            ("width=32", "is of another architecture, in "),
            ("width=32", "Leave `model` out of the recipe"),
        )
    ),
]
WRONG_DEVICES = ["nonsense", "meta", "cuda:", "cuda:x", "cpu:x", "''"]
EVALUATE = [
    ("--manifest gone.jsonl", "gone.jsonl: there is no such file or folder"),
    ("--manifest {lost}", "none of its 1 utterances can be evaluated; the first, gone: "),
    ("--manifest {pairs}", "pairs.jsonl:1: `target_lang` is missing: every line needs it."),
    (
        "--manifest {french}",
        "none of its 2 utterances can be evaluated; the first, first: the lang",
    ),
    ("--manifest {dev} --normalizer nope", "must be one of none, basic, whisper_english"),
    ("--manifest {dev} --method beam", "invalid choice: 'beam'"),
    ("--manifest {dev} --frame-budget 0", "must be an integer from 1 on, but is '0'"),
    ("--manifest {dev} --worst -1", "must be an integer from 0 on, but is '-1'"),
    *((f"--manifest {{dev}} --device {x}", "`device` must be auto, cpu or") for x in WRONG_DEVICES),
    *((f"--manifest {{dev}} --device {x}", NO_GPU) for x in ("cuda", "cuda:1")),
]
TRANSCRIBE = [
    ("", "`FILE` or `--manifest` must be given, but both are missing: name a recording."),
    ("x.wav --continue", "`--continue` must have `--output`"),
    ("--manifest gone.jsonl", "gone.jsonl: there is no such file or folder."),
    ("{wav} --language fr", "must be one of en, but is 'fr'"),
    ("{wav} --target-language fr", "must be one of en, but is 'fr'"),
    ("x.wav --latency 3", "`--latency` must be left out without `--stream`"),
    ("x.wav --gap 0.01", "`gap_seconds` must be at least 0.1, but is 0.01"),
    ("{wav} --beam 4 --nbest 3", "`--nbest` must have `--json`"),
    ("{wav} --confidence", "`--confidence` must have `--json`"),
    ("{wav} --words", "`--words` must have a format that holds the times of words, but the format"),
    ("{wav} --cues", "`--cues` must have `--json`, but the format is text: add `--json`"),
    ("{wav} --json --lines 3", "`--lines` must be left out without subtitles, but is 3: add"),
    ("{wav} --format srt --line-width 9", "`line_width` must be at least 10, but is 9"),
    ("{wav} --format vtt --cue-seconds 200ms", "`cue_seconds` must be at least 1, but is 0.2"),
    ("--stream x.wav", "`--stream` must have no other input than standard input"),
    ("--stream --output out", "`--stream` must write to standard output"),
    ("--stream --latency 0.1", "`--latency` must be at least 1 s with a model that"),
    ("--stream --latency soon", "must be seconds above 0, such as 480ms or 0.48, but is 'soon'"),
    ("--stream --sample-rate 10", "`sample_rate` must be from 1000"),
    ("--stream --beam 4 --second-lm {run}", "`--second-lm` must be left out with `--stream`"),
    *((f"x.wav --device {device}", "`device` must be auto, cpu or") for device in WRONG_DEVICES),
    ("{wav} --device cuda", NO_GPU),
]
OTHERS = [
    (
        "export {run} {tmp}/hf --averaged 9",
        "`--averaged` must be from 1 to 2, the checkpoints that",
    ),
    ("export {run} {tmp}/hf --averaged 0", "must be an integer from 1 on, but is '0'"),
    (
        "export {run} {tmp}/o --license 'CC BY'",
        "must be a name such as cc-by-4.0, in small letters",
    ),
    ("export {run} {tmp}/o --latency 160ms", "must be left out for `--format huggingface`"),
    ("export {run} {tmp}/o --format nemo", "must be a file that ends in .nemo for `--format nemo`"),
    ("export {run} {nemo}", "must be a file that ends in .nemo for `--format nemo`, but is "),
    ("export {run} {taken}", "`OUT` must be a folder, but is the file "),
    ("export {run} {run}", "would be overwritten"),
    ("import {tmp}/none.nemo {tmp}/out", "none.nemo: there is no such file"),
    ("import {folder} {tmp}/out", "must be a .nemo file, or a folder"),
    ("compare {folder}", "holds no evaluation: `effasr evaluate "),
    ("report {folder}", "not a folder of utterances: it needs cuts.jsonl.gz"),
    ("import {adapter} {tmp}/out", "but is an adapter of one: merge them with peft"),
    ("export {run} {tmp}/hf --head transducer", "an output of the model (decoder, ctc), but is tr"),
    ("tune {run} {dev} --beam 1 --output {tmp}/t.yaml", "`--beam` must be at least 2"),
    (
        "label {run} {wav} {folder}/labels --min-confidence 2",
        "`--min-confidence` must be from 0 to 1",
    ),
    ("doctor training.compile=true", "`overrides` must come with --recipe"),
    ("train dema", "did you mean `demo`?"),
    ("train x/y/z", "the recipes are add_language, canary_1"),
    ("train {bytes}", "must be UTF-8"),
    ("train {number}", "`data` must be a mapping (DataConfig), but is 3"),
]
GROUPS = {
    "": ARGUMENTS + OTHERS,
    "recipes": RECIPES,
    "init": INIT,
    "plan": PLAN,
    "calibrate {recipe}": CALIBRATE,
    "train {recipe} output={tmp}/runs": TRAIN,
    "evaluate --run {run}": EVALUATE,
    "transcribe --run {run}": TRANSCRIBE,
}
ROWS = [(f"{start} {rest}", line) for start, rows in GROUPS.items() for rest, line in rows]


@pytest.fixture
def places(workplace, tmp_path) -> dict[str, str]:
    """What the fields in braces stand for: see `conftest.workplace`."""
    folder, nemo = tmp_path / "folder", tmp_path / "folder.nemo"
    folder.mkdir()
    nemo.mkdir()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    files = {
        "taken.yaml": "",
        "empty.jsonl": "",
        "long.jsonl": '{"duration": 50, "num_tokens": 1}\n',
        "bad.jsonl": '{"duration": 1, "num_tokens": 1}\noops\n',
        "pairs.jsonl": '{"source_text": "A", "text": "a", "source_lang": "de"}\n',
        "lost.jsonl": '{"audio_filepath": "gone.wav", "text": "a"}\n',
        "french.jsonl": "".join(
            json.dumps({"audio_filepath": workplace.wav, "text": "a", "lang": "fr", "id": name})
            + "\n"
            for name in ("first", "second")
        ),
        "bytes.yaml": "\udcff\udcfe",
        "number.yaml": "data: 3",
        "other.json": '{"frame_budget": 3}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, errors="surrogateescape")
    made = {name: f"{workplace.folder}/{name}" for name in ("dev", "train")}
    made |= {name.partition(".")[0]: f"{tmp_path}/{name}" for name in files}
    made |= {"recipe": workplace.recipe, "run": str(workplace.run), "wav": workplace.wav}
    made |= {"tok": f"{workplace.folder}/tokenizer", "folder": str(folder), "nemo": str(nemo)}
    made["adapter"] = str(adapter)
    return made | {"tmp": str(tmp_path)}


@pytest.mark.parametrize(("line", "message"), ROWS)
def test_refusals(effasr, piped, places, tmp_path, monkeypatch, line, message):
    if message == NO_GPU and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    piped(bytes(32_000))
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    failed = effasr(*(word.format_map(places) for word in shlex.split(line)))
    assert (failed.code, failed.out) == (2, "")
    assert message in failed.error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("strategy", "option", "value"),
    [
        ("packed", "--batch-size", 8),
        ("packed", "--buckets", 4),
        ("random", "--epoch-end", "exact"),
        ("sync_bucketed_2d", "--batch-size", 8),
    ],
)
def test_options_of_other_strategies_are_refused(effasr, places, strategy, option, value):
    provided = ("plan", "--manifest", places["train"], "--world-size", 1, option, value)
    failed = effasr(*provided, "--strategy", strategy)
    assert failed.code == 2
    assert f"`{option}` must be left out for strategy {strategy}" in failed.error
    assert effasr(*provided, "--strategy", "all").code == 0


def test_a_copy_overwrites_nothing(effasr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert effasr("recipes", "copy", "small").code == 0
    (tmp_path / "small.yaml").write_text("mine")
    assert "must be a new file" in effasr("recipes", "copy", "small").error
    assert (tmp_path / "small.yaml").read_text() == "mine"

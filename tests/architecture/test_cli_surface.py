"""The commands and their options: to change them is to change this list as well."""

import argparse
import re
import shlex

import pytest

from effasr.cli.main import build_parser

RUN = ["RUN", "--run RUN"]
MANIFEST = ["MANIFEST", "--manifest MANIFEST"]
MANIFESTS = ["MANIFEST...", "--manifest MANIFEST"]
MODEL = ["--averaged N", "--window S"]
DECODING = [
    "--device DEVICE",
    "--decoding FILE.yaml",
    "--method {auto,attention,transducer,ctc,language_model}",
    "--beam N",
    "--length-penalty A",
    "--coverage-penalty B",
    "--ctc-weight W",
    "--no-repeat-ngram N",
    "--lm FILE",
    "--lm-unit {token,word}",
    "--lm-weight W",
    "--instruction TEXT",
    "--gap S",
    "--chunk S",
    "--vad {auto,silero,loudness}",
    "--no-speech P",
    "--fallback --no-fallback",
    "--fallback-confidence P",
    "--frame-budget N",
    "--precision {float32,bfloat16}",
    "--attention {auto,triton,cuda,cpp,flash_attn_2,flash_attn_3,flash_attn_4,varlen,reference}",
]
PROMPT = ["--language LANG", "--target-language LANG", "--punctuation --no-punctuation"]
LONG_FORM = ["--long-form {chunked,sequential}", "--previous-text --no-previous-text"]
BOOST = ["--boost FILE", "--boost-weight W"]
SECOND_PASS = ["--second-lm LM", "--second-lm-weight W", "--second-word-bonus B"]
SURFACE = {
    "prepare": [
        "SOURCE", "OUT", "--tokenizer FOLDER", "--language LANG", "--language-map MAP",
        "--text-column NAME", "--subsampling {4,8}", "--max-duration SECONDS", "--channel C",
        "--convert", "--clean LIST", "--max-unknown X", "--report",
        "--shards N", "--jobs N",
    ],
    "segment": [
        "RUN", "SOURCE", "OUT", "--min-score X", "--max-duration SECONDS", "--language LANG",
        "--device DEVICE",
    ],
    "tokenizer": [
        "MANIFEST...", "OUT", "--language LANG", "--vocab-size N", "--shared",
        "--subsampling {4,8}", "--model-type {unigram,bpe}",
        "--normalization {identity,nfc,nfkc}", "--coverage X", "--extend MODEL", "--byte-fallback",
    ],
    "init": [
        "TRAIN...", "--dev MANIFEST", "--output FILE.yaml", "--tokenizer FOLDER",
        "--init-from MODEL", "--head {ctc}", "--no-timing", "--language LANG",
    ],
    "demo-data": ["OUT", "--multilingual", "--conversations", "--utterances N"],
    "plan": [
        *MANIFESTS,
        "--strategy {packed,random,bucketed,sync_bucketed,sync_bucketed_2d,all}",
        "--recipe RECIPE", "--world-size N", "--micro-batches N", "--frame-budget N",
        "--token-budget N", "--max-duration S", "--tokenizer FOLDER", "--prompt-tokens N",
        "--batch-size N", "--buckets N", "--epochs N", "--epoch-end {carry,exact}", "--seed N",
        "--what-if", "--calibration FILE", "--tflops X",
        "--json", "--picture FILE.svg", "--dropped FILE.jsonl",
    ],
    "calibrate": [
        "RECIPE", "path.to.field=value...", "--target-bytes N", "--target-share X",
        "--objective {throughput,memory}", "--json",
    ],
    "train": ["RECIPE", "path.to.field=value...", "--show"],
    "evaluate": [
        *RUN, *MANIFEST, *MODEL, *PROMPT, "--normalizer NORMALIZER",
        "--output FOLDER", "--worst N", *DECODING, *LONG_FORM, *BOOST, "--nbest N",
        *SECOND_PASS,
        "--confidence", "--calibration FILE",
    ],
    "tune": [
        "RUN", *MODEL, "DEV", "--output FILE.yaml", *PROMPT, "--normalizer NORMALIZER",
        *DECODING, "--nbest N", *SECOND_PASS,
    ],
    "compare": ["RUN...", "--normalizer NORMALIZER", "--set NAME"],
    "report": ["RUN_OR_DATA", "OUT.html", "--tokenizer FOLDER", "--language LANG"],
    "transcribe": [
        *RUN, "FILE...", *MODEL, "--manifest MANIFEST", *PROMPT, "--track N",
        "--channel N", "--per-channel", "--format {text,json,srt,vtt,ctm}", "--json", "--words",
        "--timestamps", "--cues", "--line-width N", "--lines N", "--cue-seconds S",
        "--output FOLDER", "--continue", "--stream", "--sample-rate HZ", "--channels N",
        "--encoding {s16le,f32le}", "--latency S", *DECODING, *LONG_FORM, *BOOST,
        "--nbest N",
        *SECOND_PASS,
        "--confidence", "--calibration FILE",
    ],
    "label": [
        "RUN", "AUDIO", "OUT", "--min-confidence C", "--language LANG", *DECODING, *BOOST,
    ],
    "chat": [
        *RUN, "QUESTION", "--audio FILE", "--system TEXT", "--manifest FILE", "--beam N",
        "--max-tokens N", "--slots N", "--device DEVICE",
    ],
    "import": ["MODEL", "OUT", "--language CODE"],
    "export": [
        "RUN_OR_MODEL", "OUT", "--format {huggingface,nemo,onnx,sherpa-onnx,ctranslate2,effasr}",
        "--head {decoder,transducer,ctc}", "--merge-language LANG",
        "--quantization {float32,float16,bfloat16,int8,int8_float16,int8_float32}",
        "--averaged N", "--license LICENCE", "--author NAME", "--base-model MODEL",
        "--latency S",
    ],
    "recipes": ["ACTION", "RECIPE", "FILE"],
    "completion": [],
    "doctor": ["--recipe RECIPE", "path.to.field=value..."],
}  # fmt: skip


HELP = {"help", "help_all"}
PARSER = build_parser()
(COMMANDS,) = (a for a in PARSER._actions if isinstance(a, argparse._SubParsersAction))


def usage_of(action):
    """An argument as a user would write it; ``!`` if an option must be given."""
    value = action.metavar or action.dest.upper()
    if action.choices and action.option_strings:
        value = f"{{{','.join(map(str, action.choices))}}}"
    if not action.option_strings:
        return f"{value}{'...' if action.nargs in ('+', '*') else ''}"
    names = " ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}{'!' if action.required else ''}"


def test_the_command_line_is_what_was_agreed():
    surface = {
        name: [usage_of(action) for action in command._actions if action.dest not in HELP]
        for name, command in COMMANDS.choices.items()
    }
    assert surface == SURFACE
    general = [usage_of(action) for action in PARSER._actions if action is not COMMANDS]
    assert general == ["-h --help", "--version"]


@pytest.mark.parametrize("name", SURFACE)
def test_help_explains_everything_and_ends_with_an_example(name):
    command = COMMANDS.choices[name]
    assert " ".join(command.description.split()) in " ".join(PARSER.description.split())
    for action in command._actions:
        assert action.help
        # Not with a preposition, as in `of each utterance`, which names no thing.
        assert not re.match("(of|that|to|whose|for|by|default)\\b", action.help), action.help
    *_, heading, example = command.format_help().splitlines()
    assert heading == "example:"
    words = shlex.split(example.replace('eval "$(', "").replace(')"', ""))
    assert words[:2] == ["effasr", name]
    assert PARSER.parse_args(words[1:]).command == name


@pytest.mark.parametrize("columns", [80, 120])
def test_a_help_fits_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    parser = build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for command in (parser, *commands.choices.values()):
        assert max(map(len, command.format_help().splitlines())) <= columns, command.prog
        # Paragraphs are of a readable width, too.
        for text in (command.description, command.epilog):
            assert all(len(line) <= 90 for line in str(text).splitlines()), command.prog

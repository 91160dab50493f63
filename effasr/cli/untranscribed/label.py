"""``effasr label``: transcribes audio into a manifest to train on."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from effasr.checks import check
from effasr.cli.options import (
    MANIFEST_HELP,
    RUN_HELP,
    AddCommand,
    add_decoding,
    add_language,
    decoding_config,
    folder,
    log,
    print_line,
)
from effasr.cli.progress import decoding_progress
from effasr.decoding.config import BOOST

if TYPE_CHECKING:
    from effasr.data.prompt import Prompt
    from effasr.transcription.inputs.sources import Source


def add(command: AddCommand) -> None:
    parser = command(
        "label",
        run,
        "Transcribe audio without text into a manifest to train on.",
        "OUT/manifest.jsonl has a line for each segment, with `confidence` and `pseudo: true`;",
        "OUT/dropped.jsonl has those left out, with the reason. The confidence is the probability",
        "that the model gives to the text, as the geometric mean over its tokens: of the attention",
        "decoder, or with --method ctc or transducer over all alignments.",
        "",
        "The same command goes on after an interruption. Another --min-confidence, once all is",
        "transcribed, takes no time.",
        example="effasr label runs/mine calls labels --method ctc --min-confidence 0.8",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "audio",
        metavar="AUDIO",
        help=f"an audio file, a folder of such, a pattern, or a manifest ({MANIFEST_HELP}), whose "
        "texts are not read",
    )
    parser.add_argument("out", type=folder, metavar="OUT", help="folder for the labels")
    parser.add_argument(
        "--min-confidence",
        type=float,
        default=0.0,
        metavar="C",
        help="least confidence of a segment, from 0 to 1; others are left out (default: 0)",
    )
    add_language(parser, "language spoken in recordings whose manifest does not name one")
    add_decoding(parser, BOOST)


def run(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from effasr.checkpoint import WEIGHTS
    from effasr.data.checksums import sha256
    from effasr.distributed.process_group import choose_device
    from effasr.training.checkpointing.averaging import load_run
    from effasr.transcription.inputs.vad import Detectors
    from effasr.transcription.label import FAILED, MANIFEST_FILE, LabelFolder, checked
    from effasr.transcription.transcribe import transcribe

    if not 0 <= options.min_confidence <= 1:
        raise ValueError(
            f"`--min-confidence` must be from 0 to 1, but is {options.min_confidence:g}: choose "
            "another."
        )
    rule = "be a folder, which gets manifest.jsonl"
    remedy = "choose a name without .jsonl"
    check(Path(options.out).suffix != ".jsonl", "OUT", rule, options.out, remedy)
    config = decoding_config(options)
    if config.second_lm is not None:
        raise ValueError(
            "`second_lm` in `--decoding` must be left out for labels, because it may choose "
            f"another text than that with the confidence, but is {config.second_lm}: remove it "
            f"from {options.decoding}, with its weights."
        )
    config = replace(config, confidence=True)
    loaded, (directory,) = load_run(options.run, None, choose_device(options.device))
    default = loaded.prompt.stating(options.language)
    sources = _sources(options.audio, default)
    names = ("method", "beam", "length_penalty", "coverage_penalty", "ctc_weight")
    names += ("no_repeat_ngram", "lm_weight", "gap_seconds", "chunk_seconds", "no_speech")
    names += ("fallback", "fallback_confidence")
    settings = {name: getattr(config, name) for name in names}
    settings |= {"model": sha256(directory / WEIGHTS), "lm": config.lm and str(config.lm)}
    if config.lm_unit != "token":  # Folders of earlier versions have no such setting.
        settings["lm_unit"] = config.lm_unit
    settings["language"] = default.source
    # What `auto` is depends on the packages.
    settings["vad"] = Detectors(config.vad, loaded.model.config.features.sample_rate).name
    labels = LabelFolder(options.out, settings)
    remaining = labels.missing(sources)
    if len(remaining) < len(sources):
        have = len(sources) - len(remaining)
        log("label", f"skipping {have} of {len(sources)} recordings that have labels")
    with decoding_progress(len(remaining), "recordings") as progress:
        results = transcribe(
            loaded.model,
            loaded.tokenizer,
            map(checked, remaining),
            prompt=default,
            config=config,
            on_audio=progress.add_audio,
        )
        for source, result in zip(remaining, results, strict=True):
            labels.add(source, result, default)
            progress.done()
    report = labels.finish(options.min_confidence)
    print_line(
        f"{report.kept.utterances} segments, {report.kept.hours:.2f} h, in "
        f"{options.out / MANIFEST_FILE}"
    )
    for reason, share in sorted(report.by_reason.items()):
        print_line(f"left out: {reason} {share.utterances}, {share.hours:.2f} h")
    return 1 if FAILED in report.by_reason else 0


def _sources(audio: str, prompt: "Prompt") -> "list[Source]":
    from effasr.data.manifest.lines import ARCHIVES, has_suffix
    from effasr.data.manifest.reader import deciding_files
    from effasr.transcription.inputs.sources import find, of_manifest

    path = Path(audio)
    is_file = path.suffix in {".jsonl", ".gz"} or has_suffix(path, ARCHIVES)
    if is_file or (path.is_dir() and deciding_files(path) is not None):
        return of_manifest(path, prompt=prompt)
    return find([audio])

"""``effasr prepare``: checks recordings and transcripts before training."""

from __future__ import annotations

import argparse
from pathlib import Path

from effasr.cli.options import (
    MANIFEST_HELP,
    AddCommand,
    add_language,
    at_least,
    folder,
    print_line,
    progress_counter,
)


def add(command: AddCommand) -> None:
    """Add the command to the parser."""
    parser = command("prepare", run, "Check recordings and transcripts before training.")
    parser.add_argument("source", type=Path, metavar="SOURCE", help=MANIFEST_HELP)
    parser.add_argument(
        "out", type=folder, metavar="OUT", help="folder for the cuts, and what was dropped and why"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="also check the texts against it"
    )
    add_language(parser)
    parser.add_argument(
        "--subsampling",
        type=int,
        choices=(4, 8),
        default=8,
        help="model.encoder.subsampling of the model: 4 leaves CTC twice as many frames for the "
        "tokens of --tokenizer (default: 8)",
    )
    parser.add_argument(
        "--jobs",
        type=at_least(1),
        default=4,
        metavar="N",
        help="files read at a time (default: 4)",
    )


def run(options: argparse.Namespace) -> int:
    """Check a manifest; print what was kept and what was dropped."""
    from effasr.data.features.frame_geometry import Framing
    from effasr.data.manifest.prepare import prepare
    from effasr.data.tokenizer import load_tokenizer

    with progress_counter("utterances") as show:
        report = prepare(
            options.source,
            options.out,
            tokenizer=load_tokenizer(options.tokenizer) if options.tokenizer else None,
            language=options.language,
            framing=Framing(subsampling=options.subsampling),
            jobs=options.jobs,
            progress=show,
        )
    print_line(f"kept {report.kept.utterances} utterances, {report.kept.hours:.2f} h")
    for language, share in sorted(report.by_language.items()):
        print_line(f"  {language:28} {share.utterances:8} {share.hours:10.2f} h")
    listed = options.out / "dropped.jsonl"
    print_line(f"dropped {report.dropped.utterances} utterances, each listed in {listed}")
    for reason, share in sorted(report.by_reason.items()):
        print_line(f"  {reason:28} {share.utterances:8} {share.hours:10.2f} h")
    if not report.kept.utterances:
        raise ValueError(f"{options.source}: no utterance is left; {listed} says why.")
    return 0

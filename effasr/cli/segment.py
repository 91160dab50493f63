"""``effasr segment``: cuts long recordings with long transcripts into utterances to train on."""

import argparse
from functools import partial
from pathlib import Path

from effasr.checks import check
from effasr.cli.options import (
    RUN_HELP,
    AddCommand,
    add_device,
    add_language,
    folder,
    fraction,
    log,
    print_folded,
    print_line,
    print_next,
    seconds,
)
from effasr.cli.progress import progress_counter

# The median of right texts was 0.23 with a model of 40 % CER, and 1.0 with a good one.
_SCORE = 0.05


def add(command: AddCommand) -> None:
    parser = command(
        "segment",
        run,
        "Cut long recordings with long transcripts into utterances to train on.",
        "SOURCE is an audio file with a .txt, .srt or .vtt beside it, a folder of such, or a",
        "manifest. Its texts may have errors, lack passages, and have some that nobody speaks.",
        "OUT/manifest.jsonl has a line for each utterance, with a `confidence` from 0 to 1;",
        "OUT/dropped.jsonl has those left out, with the reason. The same command goes on after an",
        "interruption. Another --min-score, once all is aligned, takes no time.",
        example="effasr segment runs/mine talk.flac segments",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help=f"{RUN_HELP}; it must have CTC")
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="recordings with their transcripts"
    )
    parser.add_argument("out", type=folder, metavar="OUT", help="folder for the manifest")
    parser.add_argument(
        "--min-score",
        type=fraction,
        default=_SCORE,
        metavar="X",
        help=f"least confidence of an utterance; others are left out (default: {_SCORE})",
    )
    parser.add_argument(
        "--max-duration",
        type=seconds,
        default=20.0,
        metavar="SECONDS",
        help="longest utterance; longer sentences are cut at their pauses (default: 20)",
    )
    add_language(parser, "language of recordings whose manifest does not name one")
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    from effasr.checkpoint import WEIGHTS
    from effasr.data.checksums import sha256
    from effasr.data.manifest.utterance import RejectedRow
    from effasr.decoding.config import DecodingConfig
    from effasr.distributed.process_group import choose_device
    from effasr.evaluation.normalizer import basic
    from effasr.training.checkpointing.averaging import load_run
    from effasr.transcription.label import FAILED, LOW_CONFIDENCE, MANIFEST_FILE, LabelFolder
    from effasr.transcription.recognizer import Recognizer
    from effasr.transcription.segmentation import Segmenter, transcripts

    rule = "be a folder, which gets manifest.jsonl"
    check(options.out.suffix != ".jsonl", "OUT", rule, options.out, "leave .jsonl out")
    loaded, (directory,) = load_run(options.run, None, choose_device(options.device))
    check(
        loaded.model.config.ctc,
        "RUN",
        "have a CTC head, which aligns texts",
        str(options.run),
        "train one with model.ctc=true",
    )
    recognizer = Recognizer(loaded.model, loaded.tokenizer, DecodingConfig(method="ctc"))
    default = loaded.prompt.stating(options.language)
    segmenter = Segmenter(
        recognizer,
        loaded.tokenizer,
        partial(basic, language=default.target),
        punctuation=default.punctuation,
        longest=options.max_duration,
    )
    settings = {"model": sha256(directory / WEIGHTS), "language": default.source}
    settings |= {"max_duration": options.max_duration, "vad": recognizer.vad}
    labels = LabelFolder(options.out, settings)
    with progress_counter("recordings") as show:
        for number, item in enumerate(transcripts(options.source, default), 1):
            name, audio = (
                (item.id, item.audio)
                if isinstance(item, RejectedRow)
                else (item.source.id, item.source.audio)
            )
            if name in labels.done:
                log("segment", f"{name}: done before")
                continue
            try:
                if isinstance(item, RejectedRow):
                    raise ValueError(item.reason)
                labels.add_row({"id": name, "segments": segmenter.segments(item)})
            except ValueError as error:
                labels.add_row({"id": name, "audio": audio, "problem": str(error)})
            show(number)
    report = labels.finish(options.min_score)
    manifest = options.out / MANIFEST_FILE
    print_line(f"{report.kept.utterances} utterances, {report.kept.hours:.2f} h, in {manifest}")
    for reason, share in sorted(report.by_reason.items()):
        print_line(f"left out: {reason} {share.utterances}, {share.hours:.2f} h")
    low = report.by_reason.get(LOW_CONFIDENCE)
    if low is not None and low.utterances > report.kept.utterances:
        print_folded(
            f"warning: most utterances score under --min-score {options.min_score:g}: the texts "
            f"may be in another language than {default.source}, or of other recordings, or the "
            "model may be too weak."
        )
    if not report.kept.utterances:
        raise ValueError(
            f"{options.source}: no utterance is left; {options.out / 'dropped.jsonl'} has the "
            "reasons."
        )
    print_next(["prepare", str(manifest), str(options.out / "prepared")])
    return 1 if FAILED in report.by_reason else 0

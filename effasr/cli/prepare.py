"""``effasr prepare``: checks recordings and transcripts before training."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from effasr.cli.options import (
    MANIFEST_HELP,
    AddCommand,
    add_language,
    add_subsampling,
    at_least,
    folder,
    fraction,
    print_folded,
    print_line,
    print_next,
    seconds,
)
from effasr.cli.progress import progress_counter
from effasr.cli.report import corpus, write

_FEW_SILENT_ENDS = 0.05  # share of utterances

if TYPE_CHECKING:
    from effasr.data.features.frame_geometry import Framing
    from effasr.data.manifest.prepare import Clean
    from effasr.data.statistics.survey import Survey


def add(command: AddCommand) -> None:
    parser = command(
        "prepare",
        run,
        "Check recordings and transcripts before training.",
        example="effasr prepare train.jsonl data/train",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help=MANIFEST_HELP)
    parser.add_argument(
        "out",
        type=folder,
        metavar="OUT",
        help="folder for the cuts and the list of dropped utterances",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="tokenizer to check the texts against"
    )
    add_language(parser, default="en")
    parser.add_argument(
        "--language-map",
        type=language_map,
        default={},
        metavar="MAP",
        help="languages to train as others, such as xx=sw or xx=sw,yy=tr: a language that the "
        "tokenizer has not as a near one that it has",
    )
    parser.add_argument(
        "--text-column",
        metavar="NAME",
        help="field or column of the text in JSON lines, tables, tar files and datasets (default: "
        "text, sentence, transcription, transcript ...)",
    )
    add_subsampling(parser)
    parser.add_argument(
        "--max-duration",
        type=seconds,
        default=40.0,
        metavar="SECONDS",
        help="longest utterance; longer ones are dropped (default: 40), as by data.max_duration in "
        "training",
    )
    parser.add_argument(
        "--channel",
        type=channel,
        metavar="C",
        help="channel of utterances for which SOURCE names none: a number from 0, A or B, or "
        "loudest, the strongest of each (default: the mean of all)",
    )
    parser.add_argument(
        "--convert",
        action="store_true",
        help="let ffmpeg write FLAC copies below OUT of files that training cannot read, such as "
        "M4A and WebM",
    )
    parser.add_argument(
        "--clean",
        type=clean,
        metavar="LIST",
        help="transforms of the texts, in this order and separated by commas: lower, "
        "no-punctuation, tags=<...> (or another pair of brackets)",
    )
    parser.add_argument(
        "--max-unknown",
        type=fraction,
        default=0.05,
        metavar="X",
        help="largest share of tokens that the tokenizer may not know (default: 0.05)",
    )
    parser.add_argument(
        "--report", action="store_true", help="write OUT/report.html, as `effasr report OUT` does"
    )
    parser.add_argument(
        "--shards",
        type=at_least(1),
        metavar="N",
        help="write cuts and audio as N shards in OUT/shards, lhotse's Shar format: the source is "
        "then needed no more",
    )
    parser.add_argument(
        "--jobs",
        type=at_least(1),
        default=4,
        metavar="N",
        help="files read at a time (default: 4)",
    )


def channel(text: str) -> int | Literal["loudest"]:
    if text.lower() == "loudest":
        return "loudest"
    number = {"A": 0, "B": 1}.get(text.upper(), int(text) if text.isdecimal() else -1)
    if number < 0:
        raise argparse.ArgumentTypeError(
            f"must be a number from 0, A, B or loudest, but is {text!r}"
        )
    return number


def language_map(text: str) -> dict[str, str]:
    from effasr.data.languages import UnknownLanguageError, code_or_name, language_code

    languages = {}
    for pair in text.split(","):
        name, _, near = (part.strip() for part in pair.partition("="))
        code = code_or_name(name)
        if not name or not near or code in languages:
            raise argparse.ArgumentTypeError(
                f"must be pairs such as xx=sw,yy=tr, each language once, but is {text!r}"
            )
        try:
            languages[code] = language_code(near)
        except UnknownLanguageError as error:
            raise argparse.ArgumentTypeError(f"{pair.strip()!r}: {error}") from error
    return languages


def clean(text: str) -> "Clean":
    from effasr.data.manifest.prepare import parse_clean

    try:
        return parse_clean(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _framing(options: argparse.Namespace) -> "Framing":
    """Return that of the model whose tokenizer is named, such as an imported one."""
    from effasr.checkpoint import DESCRIPTION, read_description
    from effasr.data.features.frame_geometry import Framing

    model = Path(options.tokenizer or "").parent
    if options.tokenizer and options.subsampling is None and (model / DESCRIPTION).is_file():
        return read_description(model).model.features.framing
    return Framing(subsampling=options.subsampling or 8)


def run(options: argparse.Namespace) -> int:
    from effasr.data.filters.rules import Limits, Reason
    from effasr.data.manifest.prepare import LEAST_SILENCE, Share, prepare
    from effasr.data.statistics.guidance import percent
    from effasr.data.statistics.survey import Survey
    from effasr.data.tokenizer import WhisperTokenizer, load_tokenizer
    from effasr.data.tokenizer.fidelity import TextFidelity

    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    for name, near in options.language_map.items():
        if tokenizer is not None and tokenizer.languages and not tokenizer.knows(near):
            raise ValueError(
                f"`--language-map` must name languages of the tokenizer, but has {name}={near}: it "
                f"knows {', '.join(tokenizer.languages)}."
            )
    fidelity = None if tokenizer is None else TextFidelity(tokenizer)
    framing, survey = _framing(options), Survey()
    with progress_counter("utterances") as show:
        report = prepare(
            options.source,
            options.out,
            tokenizer=tokenizer,
            language=options.language,
            limits=Limits(
                max_duration=options.max_duration,
                ctc=not isinstance(tokenizer, WhisperTokenizer),
                framing=framing,
            ),
            jobs=options.jobs,
            progress=show,
            note=survey.add_cut,
            fidelity=fidelity,
            clean=options.clean,
            channel=options.channel,
            convert=options.convert,
            language_map=options.language_map,
            text_column=options.text_column,
            shards=options.shards,
        )
    print_line(f"kept {report.kept.utterances} utterances, {report.kept.hours:.2f} h")
    for language, share in sorted(report.by_language.items()):
        print_line(f"  {language:28} {share.utterances:8} {share.hours:10.2f} h")
    if count := report.assumed_language:
        print_line(f"{count} utterances name no language: --language {options.language} is taken")
    listed = options.out / "dropped.jsonl"
    print_line(f"dropped {report.dropped.utterances} utterances, each listed in {listed}")
    for reason, share in sorted(report.by_reason.items()):
        print_line(f"  {reason:28} {share.utterances:8} {share.hours:10.2f} h")
    if (example := report.examples.get(Reason.UNKNOWN_LANGUAGE)) is not None:
        print_folded(f"{Reason.UNKNOWN_LANGUAGE}, such as {example}")
    for name, count in report.mapped_languages.items():
        if count:
            print_line(f"{count} utterances in {name} as {options.language_map[name]}")
        else:
            print_folded(
                f"warning: no utterance is in {name}, which --language-map names: utterances of "
                f"which SOURCE names no language are in that of --language, {options.language}."
            )
    if report.unread_fields:
        fields = [f"{name!a} ({count})" for name, count in report.unread_fields.items()]
        more = f" and {len(fields) - 10} more" if len(fields) > 10 else ""
        print_folded(f"fields that are not read, with their lines: {', '.join(fields[:10])}{more}")
    if report.conflicting_texts:
        print_folded(
            f"warning: {report.conflicting_texts} lines have another text than an earlier line has "
            "for the same part of the same recording: name the `channel` or the times of each."
        )
    if not report.kept.utterances:
        commonest = max(report.by_reason, key=lambda name: report.by_reason[name].utterances)
        raise ValueError(
            f"{options.source}: no utterance is left; {listed} has the reasons. The commonest is "
            f"{commonest}, such as {report.examples[commonest]}"
        )
    impossible = report.by_reason.get(Reason.CTC_INFEASIBLE, Share()).utterances
    # Whisper has no CTC head, and may have many tokens per word.
    has_ctc = tokenizer is not None and not isinstance(tokenizer, WhisperTokenizer)
    _describe(survey, framing, impossible, has_ctc=has_ctc)
    silent = report.silent_ends
    if silent is not None and (share := silent / report.kept.utterances) < _FEW_SILENT_ENDS:
        print_folded(
            f"silence of {LEAST_SILENCE:g} s or more at an end: in {percent(share)} % of the "
            "utterances. A model that is trained on them will not know silence: set "
            "data.silence_padding.probability=0.5"
        )
    if fidelity is not None:
        for line in fidelity.lines():
            print_folded(line)
        fidelity.check(options.max_unknown, "--max-unknown")
    if options.report:
        page = options.out / "report.html"
        write(page, corpus(options, options.out, page))
    known = options.tokenizer and options.tokenizer.resolve()
    is_of_model = known is not None and (known.parent / "model.yaml").is_file()
    model = ["--init-from", str(options.tokenizer.parent)] if is_of_model else []
    print_next(["init", str(options.out), "--dev", "DEV", *model])
    return 0


def _describe(survey: "Survey", framing: "Framing", impossible: int, *, has_ctc: bool) -> None:
    """Print statistics, and a warning about CTC, for which ``impossible`` ones were dropped."""
    from effasr.data.features.frame_geometry import Framing
    from effasr.data.statistics import guidance

    print_folded(guidance.describe_letters(survey.characters, len(survey.speakers)))
    ratios = survey.counted(framing, excluded=impossible)
    if not has_ctc or ratios is None:
        return
    print_folded(guidance.describe_alignment(ratios, framing))
    warning = guidance.warn_about_alignment(
        ratios,
        framing,
        with_subsampling=lambda other: survey.counted(Framing(subsampling=other)),
        survey=lambda: survey,
    )
    if warning:
        print_line("\n".join(warning))

"""``effasr evaluate``: transcribes a manifest and counts the errors."""

import argparse
import os
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from effasr.checks import check
from effasr.cli.options import (
    CONFIDENCE,
    MANIFEST_HELP,
    NBEST,
    RUN_HELP,
    AddCommand,
    add_decoding,
    add_model,
    add_positional,
    add_prompt,
    at_least,
    decoding_config,
    folder,
    load_checkpoints,
    log,
    print_folded,
    print_line,
    print_next,
    read_cuts,
)
from effasr.cli.progress import decoding_progress, working
from effasr.decoding.config import BOOST, LONG_FORM, SEARCH, SECOND_PASS, DecodingConfig
from effasr.untrusted.remote import url_of

# Fields that the search over text pairs obeys; its method follows from the model.
_OF_TEXTS = {*SEARCH, *BOOST, "precision"} - {"method"}


def add(command: AddCommand) -> None:
    parser = command(
        "evaluate",
        run,
        "Transcribe a manifest and count the errors, by language.",
        "Of text pairs, texts are written from `source_text`; translations have BLEU and chrF.",
        example="effasr evaluate runs/mine data/dev --beam 4",
    )
    add_positional(parser, "run", "RUN", RUN_HELP, required=True)
    add_positional(parser, "manifest", "MANIFEST", MANIFEST_HELP, required=True)
    add_model(parser)
    add_prompt(parser)
    parser.add_argument(
        "--normalizer",
        default="basic",
        help="normalizer applied to reference and hypothesis before scoring: none, basic (lower "
        "case, no punctuation; the default), whisper_english or open_asr_leaderboard_v1",
    )
    parser.add_argument(
        "--output",
        type=folder,
        metavar="FOLDER",
        help="folder that receives wer.json and hypotheses.jsonl (default: RUN/evaluation/SET)",
    )
    parser.add_argument(
        "--worst",
        type=at_least(0),
        default=5,
        metavar="N",
        help="utterances with the most errors to show (default: 5)",
    )
    add_decoding(parser, LONG_FORM, BOOST, NBEST, SECOND_PASS, CONFIDENCE)


def run(options: argparse.Namespace) -> int:
    from effasr.checkpoint import WEIGHTS
    from effasr.data.checksums import sha256
    from effasr.data.manifest.pairs import is_text_only, pairs
    from effasr.evaluation.evaluate import evaluate, evaluate_pairs
    from effasr.evaluation.result import save, set_name
    from effasr.evaluation.tables import report

    folder = options.output or _default_folder(options)
    loaded, checkpoints = load_checkpoints(options)
    # Averaged weights are in no file, and in another window it is another model; and a training may
    # remove the file while it is evaluated.
    is_saved = options.averaged is None and options.window is None
    weights = sha256(checkpoints[0] / WEIGHTS) if is_saved else None
    if is_text_only(options.manifest):
        config = _config_of_texts(options)
        members = list(pairs(options.manifest))
        with working(f"writing {len(members)} texts"):
            evaluation = evaluate_pairs(
                loaded.model,
                loaded.tokenizer,
                members,
                normalizer=options.normalizer,
                config=config,
            )
    else:
        cuts, unreadable = read_cuts(options, loaded)
        with decoding_progress(len(cuts)) as decoded:
            evaluation = evaluate(
                loaded.model,
                loaded.tokenizer,
                cuts,
                normalizer=options.normalizer,
                config=decoding_config(options),
                failures=unreadable,
                on_result=decoded.add,
            )
    if not evaluation.utterances:
        first = evaluation.failures[0]
        count = len(evaluation.failures)
        raise ValueError(
            f"{options.manifest}: none of its {count} utterances can be evaluated; the first, "
            f"{first.id}: {first.reason}"
        )
    print_folded(report(evaluation, options.worst))
    # A checkpoint of a run is removed when there are newer ones.
    is_checkpoint = options.run.resolve().parent.name == "checkpoints"
    if options.output is None and (
        is_checkpoint or url_of(options.run) or not os.access(options.run, os.W_OK)
    ):
        reason = "is a checkpoint of a run" if is_checkpoint else "cannot be written to"
        print_folded(
            f"not saved, because {options.run} {reason}: --output FOLDER keeps the results"
        )
    else:
        names = [path.name for path in checkpoints] if options.averaged else []
        save(
            *(evaluation, folder),
            model=weights,
            of_set=set_name(options.manifest),
            averaged=names,
            manifest=os.path.abspath(options.manifest),
        )
        print_line(f"written to {folder}")
    run = str(options.run)
    print_next(
        *(["report", run], ["compare", run, "OTHER"], ["transcribe", run, "FILE"]),
        ["export", run, "OUT"],
    )
    if evaluation.failures:
        log("evaluate", f"{len(evaluation.failures)} utterances failed and are not counted")
        return 1
    return 0


def _config_of_texts(options: argparse.Namespace) -> DecodingConfig:
    """Return `decoding_config`, without options and fields that text pairs would not obey."""
    for name in ("language", "target_language", "punctuation"):
        remedy = "each line of text pairs says it"
        value = getattr(options, name)
        check(value is None, name, "be left out for text pairs", value, remedy)
    config = decoding_config(options)
    for item in fields(config):
        value = getattr(config, item.name)
        remedy = "texts have no audio and one result"
        is_obeyed = item.name in _OF_TEXTS or value == item.default
        check(is_obeyed, item.name, "be left out for text pairs", value, remedy)
    return config


def _default_folder(options: argparse.Namespace) -> Path:
    """RUN/evaluation/SET, with a suffix for other weights or windows."""
    from effasr.evaluation.result import read_summary, set_name

    suffix = "" if options.averaged is None else f"-averaged-{options.averaged}"
    suffix += "" if options.window is None else f"-window-{options.window:g}"
    folder = options.run / "evaluation" / f"{set_name(options.manifest)}{suffix}"
    manifest = other = os.path.abspath(options.manifest)
    with suppress(OSError, ValueError):  # there is none, or it is of a process that was killed
        other = read_summary(folder).get("manifest", manifest)
    rule = f"be given, as {folder} has the results of another set of that name, {other}"
    both_exist = os.path.exists(other) and os.path.exists(manifest)
    is_free = not both_exist or os.path.samefile(other, manifest)
    check(is_free, "--output", rule, None, f"name a folder, such as --output {folder}-2")
    return folder

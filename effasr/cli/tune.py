"""``effasr tune``: chooses the weights of a search on a dev set."""

import argparse
import itertools
from pathlib import Path

from effasr.checks import check
from effasr.cli.options import (
    MANIFEST_HELP,
    NBEST,
    RUN_HELP,
    AddCommand,
    add_decoding,
    add_model,
    add_prompt,
    decoding_config,
    load_checkpoints,
    log,
    print_folded,
    print_line,
    read_cuts,
)
from effasr.cli.progress import decoding_progress, progress_counter
from effasr.decoding.config import SECOND_PASS

_BEAM = 8
"""The default: without a beam there is nothing to choose among."""


def add(command: AddCommand) -> None:
    parser = command(
        "tune",
        run,
        "Choose the weights of a search by WER, or BLEU of translations, on a dev set.",
        "The set is decoded once, with the N best texts of each utterance and their scores by each",
        "part: decoder and CTC, --lm, --second-lm. --ctc-weight, --lm-weight, --length-penalty,",
        "--second-lm-weight and --second-word-bonus are chosen among these texts, as far as they",
        "have an effect. Weights stay as given unless others make fewer errors than the best of as",
        "many would by chance (p < 0.05).",
        "",
        "transcribe, evaluate and label read the file with --decoding. Measure on another set.",
        example="effasr tune runs/mine dev.jsonl --beam 8 --ctc-weight 0.3",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help=RUN_HELP)
    add_model(parser)
    parser.add_argument("manifest", type=Path, metavar="DEV", help=MANIFEST_HELP)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.yaml",
        help="file that receives the options (default: RUN/decoding.yaml; required for a model "
        "directory)",
    )
    add_prompt(parser)
    parser.add_argument(
        "--normalizer",
        default="basic",
        help="normalizer applied to reference and hypothesis before scoring, as for evaluate "
        "(default: basic)",
    )
    add_decoding(parser, NBEST, SECOND_PASS, beam=_BEAM)


def run(options: argparse.Namespace) -> int:
    from effasr.evaluation.result import set_name
    from effasr.evaluation.tuning.decoding_file import DECODING_FILE, write_decoding
    from effasr.evaluation.tuning.tune import tune

    config = decoding_config(options)
    rule = "be at least 2, which gives alternatives to choose among"
    check(config.beam >= 2, "--beam", rule, config.beam, "8 is usual")
    path = options.output
    if path is None:
        if not (options.run / "checkpoints").is_dir():
            raise ValueError(
                f"`--output` must be given for {options.run}, which is a model directory and no "
                "run: name a file for the options."
            )
        path = options.run / DECODING_FILE
    loaded, _ = load_checkpoints(options)
    cuts, unreadable = read_cuts(options, loaded)
    tried = itertools.count(1)
    with decoding_progress(len(cuts)) as decoded, progress_counter("trials of weights") as trials:
        result = tune(
            loaded.model,
            loaded.tokenizer,
            cuts,
            config,
            normalizer=options.normalizer,
            failures=unreadable,
            on_result=decoded.add,
            on_trial=lambda: trials(next(tried)),
        )
    print_folded(result.report())
    of = "" if options.averaged is None else f" with --averaged {options.averaged}"
    write_decoding(path, result.config, result.comment(set_name(options.manifest) + of))
    print_line(f"written to {path}")
    if result.failures:
        log("tune", f"{len(result.failures)} utterances failed and are not counted")
        return 1
    return 0

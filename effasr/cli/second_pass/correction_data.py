"""``effasr make-correction-data``: text pairs from n-best lists to references."""

import argparse
from dataclasses import replace
from pathlib import Path

from effasr.cli.options import (
    MANIFEST_HELP,
    NBEST,
    RUN_HELP,
    AddCommand,
    add_decoding,
    add_prompt,
    decoding_config,
    log,
    print_line,
    read_cuts,
)
from effasr.cli.progress import decoding_progress
from effasr.decoding.config import SECOND_PASS

_BEAM = 8
_MOST_SHOWN = 5


def add(command: AddCommand) -> None:
    parser = command(
        "make-correction-data",
        run,
        "Write pairs of the N best texts and the reference to train on.",
        "A line has the texts as `source_text`, the best first, separated by ` | `, and the",
        "reference as `text`. The recipe corrector trains on such a manifest, or a model with",
        "`model.text_encoder` beside speech (data.text_share). Use audio that RUN was not trained",
        "on: on its own training data it makes too few errors to learn from.",
        example="effasr make-correction-data runs/mine held_out.jsonl pairs.jsonl --beam 8",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument("manifest", type=Path, metavar="MANIFEST", help=MANIFEST_HELP)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl", help="the manifest to write")
    add_prompt(parser)
    parser.add_argument(
        "--source",
        metavar="NAME",
        help="name of the system that made the lists; written to each line as `source`",
    )
    add_decoding(parser, NBEST, SECOND_PASS, beam=_BEAM)


def run(options: argparse.Namespace) -> int:
    from effasr.checkpoint import load_best
    from effasr.data.atomic_files import atomic_file
    from effasr.distributed.process_group import choose_device
    from effasr.evaluation.evaluate import correction_pairs
    from effasr.transcription.json_files import json_line
    from effasr.transcription.results import Failure

    config = decoding_config(options)
    config = replace(config, nbest=config.nbest or config.beam)
    loaded = load_best(options.run, choose_device(options.device))
    cuts, failures = read_cuts(options, loaded)
    count = 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with decoding_progress(len(cuts)) as decoded, atomic_file(options.out) as file:
        for item in correction_pairs(
            loaded.model,
            loaded.tokenizer,
            cuts,
            config,
            on_result=decoded.add,
            source_name=options.source,
        ):
            if isinstance(item, Failure):
                failures.append(item)
            else:
                file.write(json_line(item).encode("utf-8"))
                count += 1
        if not count:
            first = failures[0]
            raise ValueError(
                f"{options.manifest}: none of its {len(failures)} utterances gives a pair; the "
                f"first, {first.id}: {first.reason}"
            )
    print_line(f"{count} pairs in {options.out}")
    for item in failures[:_MOST_SHOWN]:
        log("make-correction-data", f"{item.id}: {item.reason}")
    if failures:
        log("make-correction-data", f"{len(failures)} utterances gave no pair")
    return 1 if failures else 0

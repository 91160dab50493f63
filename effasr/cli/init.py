"""``effasr init``: writes a recipe that fits a corpus."""

import argparse
from pathlib import Path

from effasr.cli.options import (
    MANIFEST_HELP,
    AddCommand,
    add_language,
    folder,
    log,
    print_folded,
    print_line,
    print_next,
)
from effasr.cli.progress import progress_counter, working

_TOKENIZER = Path("data/tokenizer")


def add(command: AddCommand) -> None:
    parser = command(
        "init",
        run,
        "Write a recipe for a corpus, from published practice for its size.",
        "It prints the commands to run next. To start from a trained model is better than to train",
        "from scratch where there are fewer than about 100 hours: --init-from MODEL.",
        example="effasr init data/train --dev data/dev --output speech.yaml",
    )
    parser.add_argument("train", type=Path, nargs="+", metavar="TRAIN", help=MANIFEST_HELP)
    parser.add_argument(
        "--dev",
        type=Path,
        nargs="+",
        default=[],
        metavar="MANIFEST",
        help="manifests to validate on, with other sentences than TRAIN and best other speakers",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("recipe.yaml"),
        metavar="FILE.yaml",
        help="recipe to write, which must not exist yet; its name is that of the run (default: "
        "recipe.yaml)",
    )
    parser.add_argument(
        "--tokenizer",
        type=folder,
        metavar="FOLDER",
        help=f"the tokenizer, or where to train it next (default: {_TOKENIZER})",
    )
    parser.add_argument(
        "--init-from", type=Path, metavar="MODEL", help="a run or a model directory to fine-tune"
    )
    parser.add_argument(
        "--head",
        choices=("ctc",),
        help="new output, with a tokenizer for TRAIN, on the encoder of --init-from",
    )
    parser.add_argument(
        "--no-timing",
        action="store_true",
        help="do not train a few steps to measure the expected time",
    )
    add_language(parser, default="en")


def run(options: argparse.Namespace) -> int:
    from effasr.data.atomic_files import write_atomically
    from effasr.data.statistics.guidance import fold
    from effasr.planning.initial import Initial

    output: Path = options.output
    if output.suffix not in (".yaml", ".yml") or output.exists():
        raise ValueError(
            f"`--output` must be a new file that ends in .yaml, but is {str(output)!r}: name "
            "another one, or remove it."
        )
    if options.init_from is None and options.head is not None:
        raise ValueError(
            f"`--head` must be left out without --init-from, but is {options.head}: name the "
            "model whose encoder is read."
        )
    if options.init_from is not None and options.tokenizer is not None and options.head is None:
        raise ValueError(
            f"`--tokenizer` must be left out with --init-from, because the model has its own, but "
            f"is {str(options.tokenizer)!r}: --head ctc learns another one."
        )
    with progress_counter("utterances read") as show:
        initial = Initial.of(
            options.train,
            dev=options.dev,
            name=output.stem,
            tokenizer=options.tokenizer or _TOKENIZER,
            init_from=options.init_from,
            new_head=options.head is not None,
            language=options.language,
            progress=show,
        )
    for line in initial.describe():
        print_folded(line)
    time = None
    if not options.no_timing:
        log("init", "training a few steps to measure the time")
        with working("training a few steps"):
            time = initial.expected_time()
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, initial.text(time).encode())
    for line in (
        f"{output}: {initial.summary()}",
        f"expected time: {time or 'not measured (--no-timing)'}",
    ):
        print_line("\n".join(fold(line)))
    train, tokenizer = [str(path) for path in options.train], initial.request.tokenizer
    language = [] if options.language == "en" else ["--language", options.language]
    choice = initial.vocabulary
    subsampling = [] if choice is None else ["--subsampling", str(choice.subsampling)]
    commands = [["tokenizer", *train, tokenizer, *subsampling, *language]]
    print_next(
        *(commands if choice is not None else []),
        ["train", str(output)],
        *(["evaluate", f"runs/{output.stem}", str(dev)] for dev in options.dev),
    )
    return 0

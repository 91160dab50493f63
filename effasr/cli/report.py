"""``effasr report``: one page of a run, or of a corpus."""

import argparse
from pathlib import Path

from effasr.checks import check
from effasr.cli.options import AddCommand, add_language, print_line
from effasr.cli.progress import progress_counter, working

_RUN = ("checkpoints", "metrics.jsonl", "config.yaml", "model.yaml", "evaluation")


def add(command: AddCommand) -> None:
    parser = command(
        "report",
        run,
        "Write one HTML page of a run or of a corpus.",
        "Of a run, or of a model directory with evaluations: curves, error rates, the worst",
        "utterances and the configuration. It may be in training, or broken. Of a corpus:",
        "lengths, rates, characters, speakers, levels, duplicates, outliers, and filters.",
        "The page needs neither network nor other files, but for audio above its limit.",
        "No other command writes it, but for `effasr prepare --report`.",
        example="effasr report runs/mine",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN_OR_DATA",
        help="a run, a model directory, a prepared folder or another manifest",
    )
    parser.add_argument(
        "out",
        type=Path,
        nargs="?",
        metavar="OUT.html",
        help="the page (default: report.html in the folder, or beside the file)",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="tokenizer whose tokens are counted"
    )
    add_language(parser, default="en")


def run(options: argparse.Namespace) -> int:
    source = options.source
    folder = source if source.is_dir() else source.parent
    out = options.out or folder / "report.html"
    if any((source / name).exists() for name in _RUN):
        from effasr.pages.run_page import run_page

        check(options.tokenizer is None, "--tokenizer", "be left out for a run", options.tokenizer)
        with working("reading the run"):
            content = run_page(source, out)
    else:
        content = corpus(options, source, out)
    write(out, content)
    return 0


def corpus(options: argparse.Namespace, source: Path, page: Path) -> str:
    from effasr.data.tokenizer import load_tokenizer
    from effasr.pages.corpus_page import corpus_page

    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    with progress_counter("utterances read") as show:
        return corpus_page(
            source, page, tokenizer=tokenizer, language=options.language, progress=show
        )


def write(path: Path, content: str) -> None:
    from effasr.data.atomic_files import write_atomically

    write_atomically(path, content.encode())
    print_line(f"written to {path}")

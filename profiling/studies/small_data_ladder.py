"""Trains configurations on an hour of speech, one after another, each for the same CPU time.

    python profiling/studies/small_data_ladder.py CORPUS --csv FILE.csv [--languages en]
        [--cpu-s 300] [--only NAME ...] [--seed 0] [--work FOLDER]

CORPUS is a folder with LANGUAGE_{train,dev,test}.jsonl, NeMo manifests with paths relative to it. A
configuration that already has a row is left out, so the command can be repeated. Rates are those of
the development set; `small_data/choices.py` has the configurations.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_data import table
from small_data.choices import LADDER
from small_data.corpora import Corpus, write_corpus
from small_data.effasr_runs import Choice, Commands, summary_row

STUDY = "ladder"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the configurations that have no row yet."""
    options = _parser().parse_args(arguments)
    commands = Commands(options.work, table.show)
    corpus = write_corpus(
        options.corpus, options.languages, options.work / "corpora" / "+".join(options.languages)
    )
    known = {choice.name: choice for choice in LADDER}
    unknown = sorted(set(options.only) - known.keys())
    if unknown:
        raise ValueError(
            f"`--only` must name configurations of {', '.join(known)}, but has {unknown}."
        )
    for name in options.only or known:
        if not table.is_done(
            options.csv, configuration=name, corpus=corpus.name, seed=options.seed
        ):
            run(commands, known[name], corpus, options)
    return 0


def run(commands: Commands, choice: Choice, corpus: Corpus, options: argparse.Namespace) -> None:
    """Train and evaluate one configuration, and write its rows."""
    commands.prepare(corpus)
    name = f"{choice.name.replace(' ', '_').replace(',', '')}_{options.seed}"
    trained = commands.train(choice, corpus, cpu_s=options.cpu_s, seed=options.seed, name=name)
    for decoding, arguments in choice.decoding.items():
        result = commands.evaluate(trained.run, corpus, "dev", arguments)
        row = summary_row(STUDY, choice, corpus, trained, decoding, "dev", result)
        table.append(options.csv, row | {"seed": options.seed})
        table.show(f"{choice.name}, {decoding}: WER {result['wer']:.3f}, CER {result['cer']:.3f}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, metavar="CORPUS")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--languages", nargs="+", default=["en"])
    parser.add_argument("--cpu-s", type=float, default=300.0)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/small_data"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

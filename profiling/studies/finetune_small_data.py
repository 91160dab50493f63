"""Fine-tuning against training from scratch on 10, 30 and 60 minutes of real speech.

    python profiling/studies/finetune_small_data.py CORPUS --csv FILE.csv [--minutes 10 30 60]
        [--sets en en+nl] [--base RUN | --base-cpu-s 900] [--cpu-s 300] [--recipe small]
        [--vocab-size 128] [--override FIELD=VALUE ...] [--lr 5e-4] [--utterances 4000] [--seed 0]
        [--work FOLDER]

CORPUS is a folder with LANGUAGE_{train,dev,test}.jsonl, NeMo manifests with paths relative to it.
The model to start from is trained on English that `effasr demo-data` synthesises (digits and
commands). One tokenizer serves all: its texts are those of the demo and of all of CORPUS' training
set, so that both ways learn the same tokens. Of a set with two languages each has the same
minutes, and the model to start from has heard the first alone. With ``--base`` a run that exists
is the model to start from, such as one trained on another language, and both ways have a tokenizer
of the set's own texts. Each training has the same CPU seconds of one thread, besides those of the
model to start from.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_data import table
from small_data.choices import CTC, JOINT
from small_data.corpora import Corpus, write_corpus
from small_data.effasr_runs import Choice, Commands, summary_row

STUDY = "fine-tuning"
BASE = "synthesised"
SPLIT = "test"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the model to start from, then both ways on each set that has no row yet."""
    options = _parser().parse_args(arguments)
    commands = Commands(options.work, table.show)
    decoding = {"ctc": CTC} if options.ctc_only else {"ctc": CTC, "joint": JOINT}
    overrides = tuple(options.override)
    scratch = Choice("from scratch", options.recipe, options.vocab_size, overrides, decoding)
    tuned = (*overrides, f"optimizer.lr={options.lr}")
    tuning = replace(scratch, name="fine-tuned", overrides=tuned)
    tokenizer = None
    if options.base is None:
        languages = sorted({part for name in options.sets for part in name.split("+")})
        whole = write_corpus(options.corpus, languages, options.work / "corpora" / "texts")
        demo = synthesise(commands, options.utterances)
        texts = [demo.manifest("train"), whole.manifest("train")]
        tokenizer = commands.tokenizer(texts, "demo+texts", options.vocab_size)
        base = train_base(commands, scratch, demo, tokenizer, options)
    else:
        base = options.base.resolve()
        tuning = replace(tuning, name=f"fine-tuned from {base.name}")
    for name in options.sets:
        for minutes in options.minutes:
            folder = options.work / "corpora" / f"{name}_{minutes:g}_{options.seed}"
            corpus = write_corpus(
                options.corpus, name.split("+"), folder, minutes=minutes, seed=options.seed
            )
            commands.prepare(corpus)
            if options.base is not None:
                texts = [corpus.manifest("train")]
                tokenizer = commands.tokenizer(texts, folder.name, options.vocab_size)
            kept = None if options.base is None else tokenizer
            run(commands, scratch, corpus, options, tokenizer=tokenizer)
            run(commands, tuning, corpus, options, init_from=base, tokenizer=kept)
    return 0


def synthesise(commands: Commands, utterances: int) -> Corpus:
    """Prepare the demo's English corpus, once."""
    corpus = Corpus(BASE, commands.folder / "corpora" / BASE)
    if not corpus.manifest("train").exists():
        commands.call("demo-data", str(corpus.folder), "--utterances", str(utterances))
    return corpus


def train_base(
    commands: Commands,
    choice: Choice,
    demo: Corpus,
    tokenizer: Path,
    options: argparse.Namespace,
) -> Path:
    """Train the model to start from, once; return its run."""
    run = commands.folder / "runs" / f"base_{options.seed}"
    if not (run / "trained.json").exists():
        commands.prepare(demo)
        trained = commands.train(
            choice,
            demo,
            cpu_s=options.base_cpu_s,
            seed=options.seed,
            name=run.name,
            tokenizer=tokenizer,
        )
        result = commands.evaluate(trained.run, demo, SPLIT, CTC)
        row = summary_row(STUDY, replace(choice, name=BASE), demo, trained, "ctc", SPLIT, result)
        table.append(options.csv, row | {"seed": options.seed})
        (run / "trained.json").write_text(json.dumps(result), encoding="utf-8")
    return run


def run(
    commands: Commands,
    choice: Choice,
    corpus: Corpus,
    options: argparse.Namespace,
    **start: Path | None,
) -> None:
    """Train one way on one set, unless that has a row; evaluate and write the rows."""
    wanted = {"study": STUDY, "configuration": choice.name, "corpus": corpus.name}
    if table.is_done(options.csv, **wanted, seed=options.seed):
        return
    name = f"{choice.name.replace(' ', '_')}_{corpus.name}_{options.seed}"
    trained = commands.train(
        choice, corpus, cpu_s=options.cpu_s, seed=options.seed, name=name, **start
    )
    for way, arguments in choice.decoding.items():
        result = commands.evaluate(trained.run, corpus, SPLIT, arguments)
        row = summary_row(STUDY, choice, corpus, trained, way, SPLIT, result)
        table.append(options.csv, row | {"seed": options.seed})
        table.show(f"{choice.name}, {corpus.name}, {way}: WER {result['wer']:.3f}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, metavar="CORPUS")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["en", "en+nl"])
    parser.add_argument("--minutes", nargs="+", type=float, default=[10.0, 30.0, 60.0])
    base = parser.add_mutually_exclusive_group()
    base.add_argument("--base", type=Path, metavar="RUN", help="start from this run")
    base.add_argument("--base-cpu-s", type=float, default=900.0)
    parser.add_argument("--cpu-s", type=float, default=300.0)
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--override", nargs="*", default=[], help="fields of the recipe")
    parser.add_argument("--ctc-only", action="store_true", help="the recipe has no decoder")
    parser.add_argument("--vocab-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=5e-4, help="of fine-tuning (default: 5e-4)")
    parser.add_argument("--utterances", type=int, default=4000, help="to synthesise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/small_data"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

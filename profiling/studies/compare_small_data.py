"""effasr and SpeechBrain, trained on an hour of speech for the same CPU time.

    python profiling/studies/compare_small_data.py CORPUS --peer FOLDER --csv FILE.csv
        [--sets en nl en+nl] [--cpu-s 1800] [--toolkits effasr speechbrain] [--recipe small]
        [--vocab-size 128] [--override FIELD=VALUE ...] [--raw-text] [--seed 0] [--work FOLDER]

CORPUS is a folder with LANGUAGE_{train,dev,test}.jsonl, NeMo manifests with paths relative to it.
effasr is used by its own commands: prepare, tokenizer, train, evaluate. The peer is a Conformer
with CTC and attention of SpeechBrain's own modules, trained by the practice of its recipes (see
`small_data/peer_settings.py`), of about as many parameters, on texts in lower case and without
punctuation, as its recipes have them; effasr learns the texts as they are. Each trains in one
thread for ``--cpu-s`` seconds of CPU time, which depends little on what else the machine does;
programs' starts, preparation and decoding do not count. The peer gets what effasr took. Both are
scored by effasr's normaliser and counts.

The peer is no dependency of the project. It needs a folder of its own:

    pip install --no-deps --target FOLDER speechbrain==1.1.2 hyperpyyaml ruamel.yaml joblib scipy \
        requests torchaudio==2.11.0

and without a GPU FOLDER/torchaudio/lib is to be removed, because it wants CUDA's libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import rows
from bench.processes import run as run_process
from small_data import table
from small_data.choices import CTC, JOINT
from small_data.corpora import Corpus, write_corpus
from small_data.effasr_runs import Choice, Commands, summary_row
from small_data.peer_settings import PeerSettings

TOOLKITS = ("effasr", "speechbrain")
SPLIT = "test"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run each toolkit on each set that has no row yet."""
    options = _parser().parse_args(arguments)
    runs = {"effasr": run_effasr, "speechbrain": run_peer}
    for name in options.sets:
        corpus = write_corpus(options.corpus, name.split("+"), options.work / "corpora" / name)
        for toolkit in options.toolkits:
            wanted = {"toolkit": toolkit, "corpus": name, "seed": options.seed}
            if not table.is_done(options.csv, study=study(options), **wanted):
                runs[toolkit](corpus, options)
    return 0


def study(options: argparse.Namespace) -> str:
    """Return the name of the comparison in the table."""
    return f"same CPU time, {options.cpu_s:g} s"


def budget_s(corpus: Corpus, options: argparse.Namespace) -> float:
    """Return the CPU seconds of effasr's run, whose steps are fixed beforehand, or the option."""
    for row in rows.read(options.csv):
        wanted = study(options), "effasr", corpus.name, str(options.seed)
        if (row["study"], row["toolkit"], row["corpus"], row["seed"]) == wanted:
            return float(row["cpu_s"])
    return options.cpu_s


def run_effasr(corpus: Corpus, options: argparse.Namespace) -> None:
    """Train, evaluate and write the rows of effasr."""
    commands = Commands(options.work, table.show)
    decoding = {"ctc": CTC} if options.ctc_only else {"ctc": CTC, "joint": JOINT}
    overrides = tuple(options.override)
    choice = Choice(options.recipe, options.recipe, options.vocab_size, overrides, decoding)
    commands.prepare(corpus)
    name = f"{choice.recipe}_{corpus.name}_{options.seed}"
    trained = commands.train(choice, corpus, cpu_s=options.cpu_s, seed=options.seed, name=name)
    for way, arguments in decoding.items():
        result = commands.evaluate(trained.run, corpus, SPLIT, arguments)
        row = summary_row(study(options), choice, corpus, trained, way, SPLIT, result)
        table.append(options.csv, row | {"seed": options.seed})
        table.show(f"effasr, {corpus.name}, {way}: WER {result['wer']:.3f}")


def run_peer(corpus: Corpus, options: argparse.Namespace) -> None:
    """Train the peer in a process of its own, score it and write its rows."""
    version = table.version("speechbrain", options.peer)
    text = "raw" if options.raw_text else "normalized"
    out = options.work / "runs" / f"speechbrain_{corpus.name}_{text}_{options.seed}"
    out.mkdir(parents=True, exist_ok=True)
    settings = PeerSettings(
        train=str(corpus.manifest("train")),
        test=str(corpus.manifest(SPLIT)),
        out=str(out),
        cpu_s=budget_s(corpus, options),
        seed=options.seed,
        raw_text=options.raw_text,
        vocab_size=options.vocab_size,
        encoder_layers=options.peer_layers,
    )
    settings.save(out / "settings.json")
    result = call_worker(options.peer, out / "settings.json")
    references = [line["text"] for line in corpus.rows(SPLIT)]
    for way in ("ctc", "joint"):
        lines = (out / f"hypotheses_{way}.jsonl").read_text(encoding="utf-8").splitlines()
        rates = table.rates(table.score(references, [json.loads(line)["text"] for line in lines]))
        row = {
            "study": study(options),
            "toolkit": "speechbrain",
            "version": version,
            "configuration": "conformer_small, scaled",
            "corpus": corpus.name,
            "train_hours": round(corpus.hours("train"), 3),
            "text": text,
            "vocabulary": settings.vocab_size,
            **table.training(
                **{key: result[key] for key in ("parameters", "cpu_s", "steps", "audio_s", "ctc")}
            ),
            "decoding": way,
            "split": SPLIT,
            **rates,
            "seed": options.seed,
        }
        table.append(options.csv, row)
        table.show(f"speechbrain, {corpus.name}, {way}: WER {rates['wer']}")


def call_worker(peer: Path, settings: Path) -> dict:
    """Run `small_data.peer_worker`, with the peer's folder first in the path of modules.

    Raises:
        RuntimeError: It failed.
    """
    here = Path(__file__).parent
    before = os.environ.get("PYTHONPATH", "")
    folders = [str(here.parents[1]), str(here.parents[1] / "kernels"), str(here.parent), str(here)]
    # Behind the others: the folder has its own copies of packages that the environment has, too.
    path = os.pathsep.join([*folders, *filter(None, [before]), str(peer)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "small_data.peer_worker", str(settings)]
    ended = run_process(
        command, environment=environment, echo=lambda line: table.show(line.rstrip())
    )
    if ended.code != 0:
        raise RuntimeError(f"speechbrain: {ended.reason}")
    return json.loads((settings.parent / "result.json").read_text(encoding="utf-8"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, metavar="CORPUS")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="where SpeechBrain is")
    parser.add_argument("--sets", nargs="+", default=["en", "nl", "en+nl"])
    parser.add_argument("--toolkits", nargs="+", choices=TOOLKITS, default=TOOLKITS)
    parser.add_argument("--cpu-s", type=float, default=1800.0)
    parser.add_argument("--recipe", default="small", help="of effasr (default: small)")
    parser.add_argument("--override", nargs="*", default=[], help="fields of the recipe")
    parser.add_argument("--ctc-only", action="store_true", help="the recipe has no decoder")
    parser.add_argument("--vocab-size", type=int, default=128)
    parser.add_argument("--peer-layers", type=int, default=4, help="of its encoder (default: 4)")
    parser.add_argument("--raw-text", action="store_true", help="the peer's texts, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/small_data"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

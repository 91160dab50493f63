"""Compares ways to use a language model: in the search, and among the texts that it has found.

    python profiling/studies/second_pass.py CORPUS RUN... --csv FILE.csv [--methods attention ctc]
        [--beam 16] [--order 3] [--limit N] [--device cpu] [--work FOLDER]

CORPUS is a folder that `effasr demo-data` wrote, and a RUN was trained on it. The n-grams are
estimated from the texts of CORPUS/train.jsonl, over tokens and over words. Weights are tuned on
CORPUS/dev.jsonl as `effasr tune` does, and error rates are of CORPUS/test.jsonl. Systems:

- best: beam search as it is;
- oracle: the text with the fewest errors among those that it has found;
- tuned: beam search with other shares of CTC and another length penalty;
- fusion: beam search with n-grams over tokens, and the weights of tuned;
- word_fusion: the same with n-grams over words;
- second_pass: a choice by n-grams over words among the texts that beam search has found.

Rows that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import rows
from bench.provenance import provenance
from ngram_estimate import arpa
from small_data.table import rates, show

from effasr.checkpoint import LoadedModel, load_model, resolve
from effasr.data.manifest.lines import numbered_lines, parse_object
from effasr.decoding.config import DecodingConfig
from effasr.distributed.process_group import choose_device
from effasr.evaluation.evaluate import evaluate, openable_cuts
from effasr.evaluation.result import Evaluation
from effasr.evaluation.tuning.tune import tune

COLUMNS = (
    *("run", "method", "system", "beam", "order", "weights", "dev_given", "dev_tuned"),
    *("utterances", "words", "wer", "wer_low", "wer_high", "cer"),
    *("insertions", "deletions", "substitutions", "audio_s", "seconds"),
    *("device", "torch", "triton", "git", "date"),
)
"""``dev_given`` and ``dev_tuned``: error rates of the choice among alternatives before and after
tuning; ``seconds``: of decoding the test set, with one process."""


SYSTEMS = ("best", "oracle", "tuned", "fusion", "word_fusion", "second_pass")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what has no row yet."""
    options = _parser().parse_args(arguments)
    names = ("beam", "order", "run", "method", "system")
    done = {tuple(row[name] for name in names) for row in rows.read(options.csv)}
    same = (str(options.beam), str(options.order))
    for run in options.runs:
        loaded = load_model(resolve(run), choose_device(options.device))
        models = _estimate(options, loaded)
        for method in options.methods:
            wanted = [name for name in SYSTEMS if (*same, str(run), method, name) not in done]
            for row in measured(options, loaded, method, models, wanted):
                rows.append(options.csv, COLUMNS, {"run": str(run), **row})
                show(f"{run} {method} {row['system']}: WER {100 * row['wer']:.2f} %")
    return 0


def measured(
    options: argparse.Namespace,
    loaded: LoadedModel,
    method: Any,
    models: dict[str, Path],
    wanted: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each system."""
    plain = DecodingConfig(method=method, beam=options.beam)
    configs = {
        "best": plain,
        "oracle": replace(plain, nbest=options.beam),
        "tuned": plain,
        "fusion": replace(plain, lm=models["tokens"]),
        "word_fusion": replace(plain, lm=models["words"], lm_unit="word"),
        "second_pass": replace(plain, nbest=options.beam, second_lm=models["words"]),
    }
    if method != "attention":
        # The search of CTC and transducers has no weights of its own.
        del configs["tuned"]
    for name in (name for name in configs if name in wanted):
        config, tuned = configs[name], {}
        if name not in ("best", "oracle"):
            cuts, _ = openable_cuts(options.corpus / "dev.jsonl", language=loaded.prompt.source)
            found = tune(loaded.model, loaded.tokenizer, cuts[: options.limit], config)
            weights = (f"{one}={getattr(found.tuned, one):g}" for one in found.names)
            config = found.config
            tuned = {
                "weights": " ".join(weights),
                "dev_given": round(_wer(found.before), 5),
                "dev_tuned": round(_wer(found.after), 5),
            }
        cuts, _ = openable_cuts(options.corpus / "test.jsonl", language=loaded.prompt.source)
        tested = evaluate(loaded.model, loaded.tokenizer, cuts[: options.limit], config=config)
        if tested.failures:
            raise RuntimeError(f"{tested.failures[0].id}: {tested.failures[0].reason}")
        yield {
            "method": method,
            "system": name,
            "beam": options.beam,
            "order": options.order,
            **tuned,
            **_rates(tested, oracle=name == "oracle"),
            **provenance(next(loaded.model.parameters()).device),
        }


def _rates(tested: Evaluation, *, oracle: bool) -> dict[str, Any]:
    errors = [(one.oracle if oracle else None) or one.errors for one in tested.utterances]
    return {
        "utterances": len(errors),
        **rates(errors),
        "audio_s": round(tested.audio_seconds, 1),
        "seconds": round(tested.seconds, 2),
    }


def _wer(errors: Sequence[Any]) -> float:
    return rates(errors)["wer"]


def _estimate(options: argparse.Namespace, loaded: LoadedModel) -> dict[str, Path]:
    """Write n-grams over the tokens of a model, and over words; return the files."""
    language = loaded.prompt.source
    path = options.corpus / "train.jsonl"
    lines = (parse_object(line, f"{path}:{number}") for number, line in numbered_lines(path))
    texts = [str(row["text"]) for row in lines]
    units = {
        "tokens": [
            [str(token) for token in loaded.tokenizer.encode(text, language)] for text in texts
        ],
        "words": [text.split() for text in texts],
    }
    options.work.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, sentences in units.items():
        files[name] = options.work / f"{name}.arpa"
        files[name].write_text(arpa(sentences, options.order), encoding="utf-8")
    return files


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("corpus", type=Path, metavar="CORPUS")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=["attention", "ctc"])
    parser.add_argument("--beam", type=int, default=16)
    parser.add_argument("--order", type=int, default=3)
    parser.add_argument("--limit", type=int, help="utterances of each set (default: all)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=Path("second_pass_study"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

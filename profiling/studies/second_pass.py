"""Compares ways to use texts: in the search, among the texts that it has found, and after it.

    python profiling/studies/second_pass.py CORPUS [RUN...] --csv FILE.csv [--seeds 1 2]
        [--methods attention ctc] [--corrector RUN] [--systems best oracle ...] [--beam 16]
        [--order 3] [--limit N] [--device cpu] [--work FOLDER]

CORPUS is a folder that `effasr demo-data` wrote, and a RUN was trained on it, with --corrector RUN
for its corrector. For each of --seeds both are trained in the folder --work, as
`correction/runs.py` describes; `steps` and `corrector_steps` are in the rows. The n-grams are
estimated from the texts of CORPUS/train.jsonl, over tokens and over words. Weights are tuned on
CORPUS/dev.jsonl as `effasr tune` does, and error rates are of CORPUS/test.jsonl. Systems:

- best: beam search as it is;
- oracle: the text with the fewest errors among those that it has found;
- tuned: beam search with other shares of CTC and another length penalty;
- fusion: beam search with n-grams over tokens, and the weights of tuned;
- word_fusion: the same with n-grams over words;
- second_pass: a choice by n-grams over words among the texts that beam search has found;
- corrector: a model that reads the texts that beam search has found writes the text.

The rows of best have the quality of the confidences of its words: the expected calibration error as
they are and after a fit on CORPUS/dev.jsonl, and the area under the curve.

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
from correction import runs
from ngram_estimate import arpa
from small_data.table import rates, show

from effasr.checkpoint import LoadedModel, load_model, resolve
from effasr.config import RUN_CONFIG, load
from effasr.data.manifest.lines import numbered_lines, parse_object
from effasr.decoding.config import DecodingConfig
from effasr.distributed.process_group import choose_device
from effasr.evaluation.evaluate import evaluate, openable_cuts
from effasr.evaluation.result import Evaluation
from effasr.evaluation.tuning.tune import tune
from effasr.evaluation.word_confidence import confidence_report, fit_calibration
from effasr.training.config import TrainConfig

COLUMNS = (
    *("run", "seed", "steps", "corrector_steps", "method", "system", "beam", "order"),
    *("nbest", "weights", "dev_given", "dev_tuned"),
    *("utterances", "words", "wer", "wer_low", "wer_high", "cer"),
    *("insertions", "deletions", "substitutions", "ece_raw", "ece", "auc"),
    *("audio_s", "seconds"),
    *("device", "torch", "triton", "git", "date"),
)
"""``nbest``: texts that the second pass or the corrector reads; ``dev_given`` and ``dev_tuned``:
error rates of the choice on the dev set before and after tuning; ``seconds``: of decoding the test
set, with one process."""


SYSTEMS = ("best", "oracle", "tuned", "fusion", "word_fusion", "second_pass", "corrector")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what has no row yet."""
    options = _parser().parse_args(arguments)
    names = ("beam", "order", "run", "method", "system")
    done = {tuple(row[name] for name in names) for row in rows.read(options.csv)}
    same = (str(options.beam), str(options.order))
    for run, corrector in _models(options):
        loaded = load_model(resolve(run), choose_device(options.device))
        models = _estimate(options, loaded)
        if corrector is not None:
            models["corrector"] = corrector
        about = {"run": str(run), "seed": _seed(run), "steps": _steps(run)}
        if corrector is not None:
            about["corrector_steps"] = _steps(corrector)
        for method in options.methods:
            key = (*same, str(run), method)
            wanted = [name for name in options.systems if (*key, name) not in done]
            for row in measured(options, loaded, method, models, wanted):
                rows.append(options.csv, COLUMNS, {**about, **row})
                show(f"{run} {method} {row['system']}: WER {100 * row['wer']:.2f} %")
    return 0


def _models(options: argparse.Namespace) -> Iterator[tuple[Path, Path | None]]:
    """Yield recognisers with their correctors: those that are given, then those of the seeds."""
    for run in options.runs:
        yield run, options.corrector
    settings = runs.Settings(
        work=options.work,
        steps=options.steps,
        corrector_steps=options.corrector_steps,
        utterances=options.held_out,
        beam=options.beam,
        nbest=options.corrector_nbest,
        methods=tuple(options.methods),
        device=options.device,
    )
    for seed in options.seeds:
        run = runs.recognizer(settings, options.corpus, seed)
        corrector = None
        if "corrector" in options.systems:
            corrector = runs.corrector(settings, run, run.name, seed)
        yield run, corrector


def _steps(run: Path) -> int | None:
    """Return the steps of a run's weights; None for a model directory."""
    name = resolve(run).name
    return int(name.removeprefix("step_")) if name.startswith("step_") else None


def _seed(run: Path) -> int | None:
    """Return the seed of a run; None for a model directory."""
    path = run / RUN_CONFIG
    return load(TrainConfig, path).seed if path.is_file() else None


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
    if "corrector" in models:
        read = models["corrector"]
        configs["corrector"] = replace(plain, nbest=options.corrector_nbest, corrector=read)
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
        is_read = config.second_lm is not None or config.corrector is not None
        tested = _tested(options, loaded, "test", config)
        yield {
            "method": method,
            "system": name,
            "beam": options.beam,
            "order": options.order,
            "nbest": config.nbest if is_read else None,
            **tuned,
            **(_confidence(options, loaded, plain) if name == "best" else {}),
            **_rates(tested, oracle=name == "oracle"),
            **provenance(next(loaded.model.parameters()).device),
        }


def _tested(
    options: argparse.Namespace, loaded: LoadedModel, part: str, config: DecodingConfig
) -> Evaluation:
    cuts, _ = openable_cuts(options.corpus / f"{part}.jsonl", language=loaded.prompt.source)
    tested = evaluate(loaded.model, loaded.tokenizer, cuts[: options.limit], config=config)
    if tested.failures:
        raise RuntimeError(f"{tested.failures[0].id}: {tested.failures[0].reason}")
    return tested


def _confidence(
    options: argparse.Namespace, loaded: LoadedModel, config: DecodingConfig
) -> dict[str, Any]:
    """Return the quality of the confidences of words, calibrated on the dev set."""
    config = replace(config, word_confidence=True)
    dev, test = (_tested(options, loaded, part, config) for part in ("dev", "test"))
    raw, fitted = confidence_report(test.judged), fit_calibration(dev.judged, dev.method)
    found = {"ece_raw": raw.ece, "auc": raw.auc}
    if fitted is not None:
        found["ece"] = confidence_report([(fitted(sure), ok) for sure, ok in test.judged]).ece
    return {name: None if value is None else round(value, 5) for name, value in found.items()}


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
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=["attention", "ctc"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--corrector", type=Path, metavar="RUN", help="of the given RUNs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="to train models of")
    parser.add_argument("--steps", type=int, default=2200, help="of the recogniser of a seed")
    parser.add_argument("--corrector-steps", type=int, default=2000)
    parser.add_argument("--corrector-nbest", type=int, default=3, help="texts that it reads")
    parser.add_argument(
        "--held-out", type=int, default=2500, help="recordings that a corrector learns from"
    )
    parser.add_argument("--beam", type=int, default=16)
    parser.add_argument("--order", type=int, default=3)
    parser.add_argument("--limit", type=int, help="utterances of each set (default: all)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=Path("second_pass_study"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

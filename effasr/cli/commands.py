"""What each command of ``effasr`` does with its options.

A command imports what it needs when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from effasr import config
from effasr.cli.options import decoding

if TYPE_CHECKING:
    from effasr.data.tokenizer import Tokenizer
    from effasr.model.asr import ASRModel


def demo_data(options: argparse.Namespace) -> int:
    """Synthesise the demo corpus and show what it holds."""
    from effasr.data.demo import build

    with _counting("recordings") as show:
        corpus = build(
            options.out,
            multilingual=options.multilingual,
            utterances=options.utterances,
            progress=show,
        )
    for name, split in corpus.statistics.items():
        _say(
            f"{name:6} {split.rows:6} utterances {split.hours:6.2f} h  {split.voices:4} voices  "
            f"{split.shortest_s:.1f} to {split.longest_s:.1f} s, median {split.median_s:.1f} s"
        )
    return 0


def prepare(options: argparse.Namespace) -> int:
    """Check a manifest and show what was kept and what was left out."""
    from effasr.data.manifest.prepare import prepare
    from effasr.data.tokenizer import load_tokenizer

    with _counting("utterances") as show:
        report = prepare(
            options.source,
            options.out,
            tokenizer=load_tokenizer(options.tokenizer) if options.tokenizer else None,
            language=options.language,
            jobs=options.jobs,
            progress=show,
        )
    _say(f"kept {report.kept.utterances} utterances, {report.kept.hours:.2f} h")
    for language, share in sorted(report.by_language.items()):
        _say(f"  {language:28} {share.utterances:8} {share.hours:10.2f} h")
    listed = options.out / "dropped.jsonl"
    _say(f"dropped {report.dropped.utterances} utterances, each listed in {listed}")
    for reason, share in sorted(report.by_reason.items()):
        _say(f"  {reason:28} {share.utterances:8} {share.hours:10.2f} h")
    if not report.kept.utterances:
        raise ValueError(f"{options.source}: no utterance is left; {listed} says why.")
    return 0


def tokenizer(options: argparse.Namespace) -> int:
    """Train a tokenizer on the texts of manifests."""
    from effasr.data.manifest.pairs import is_text_only, pairs
    from effasr.data.manifest.reader import iterate, request
    from effasr.data.tokenizer import train_tokenizer

    texts: dict[str, list[str]] = {}
    spoken = set()
    for manifest in options.manifests:
        if is_text_only(manifest):
            for pair in pairs(manifest):
                texts.setdefault(pair.prompt.source, []).append(pair.source)
                texts.setdefault(pair.prompt.target, []).append(pair.text)
            continue
        for cut in iterate(manifest, language=options.language):
            wanted = request(cut)
            spoken.add(wanted.source)
            texts.setdefault(wanted.target, []).append(cut.supervisions[0].text or "")
    if not texts:
        raise ValueError(f"{', '.join(map(str, options.manifests))}: no utterances to learn from.")
    tokenizer = train_tokenizer(
        texts,
        options.out,
        vocab_size=options.vocab_size,
        model_type=options.model_type,
        sources=sorted(spoken - texts.keys()),
    )
    _say(f"{options.out}: {tokenizer.vocab_size} tokens for {', '.join(sorted(texts))}")
    return 0


def train(options: argparse.Namespace) -> int:
    """Train, or show the configuration."""
    from effasr.distributed.failures import report_once_per_node
    from effasr.training.config import TrainConfig
    from effasr.training.trainer import run

    with report_once_per_node():
        settings = config.load(TrainConfig, options.recipe, options.overrides)
    if options.show:
        _say(config.dump(settings))
        return 0
    return run(settings)


def evaluate(options: argparse.Namespace) -> int:
    """Transcribe a manifest, show the error rates and keep them with the run."""
    from effasr.checkpoint import load_model, resolve
    from effasr.distributed.process_group import choose_device
    from effasr.evaluation.evaluate import evaluate, openable_cuts
    from effasr.evaluation.result import save

    loaded = load_model(resolve(options.run), choose_device(options.device))
    cuts, unreadable = openable_cuts(
        options.manifest, language=options.language or loaded.prompt.source
    )
    done = itertools.count(1)
    with _counting("utterances") as show:
        evaluation = evaluate(
            loaded.model,
            loaded.tokenizer,
            cuts,
            normalizer=options.normalizer,
            config=decoding(options),
            failures=unreadable,
            on_result=lambda _: show(next(done), len(cuts)),
        )
    if not evaluation.utterances:
        first = evaluation.failures[0]
        count = len(evaluation.failures)
        raise ValueError(
            f"{options.manifest}: none of its {count} utterances can be evaluated; the first, "
            f"{first.id}: {first.reason}"
        )
    _say(evaluation.text(worst=options.worst))
    folder = options.output or _evaluation_folder(options.run, options.manifest)
    if folder is None:
        _say(f"written nowhere, as {options.run} is no run: --output FOLDER keeps the results")
    else:
        save(evaluation, folder)
        _say(f"written to {folder}")
    if evaluation.failures:
        _note("evaluate", f"{len(evaluation.failures)} utterances failed and are not counted")
        return 1
    return 0


def _evaluation_folder(run: Path, manifest: Path) -> Path | None:
    """runs/NAME/evaluation/SET; None for a model directory, which holds a model alone."""
    if not (run / "checkpoints").is_dir():
        return None
    from effasr.evaluation.result import set_name

    return run / "evaluation" / set_name(manifest)


def import_(options: argparse.Namespace) -> int:
    """Turn a .nemo file, or a folder of Hugging Face's, into a model directory."""
    from effasr.checkpoint import save_model
    from effasr.interop.nemo.archive import CONFIG
    from effasr.model.asr import ASRModel

    source, prompt = options.source, None
    if source.is_file() or source.suffix == ".nemo" or (source / CONFIG).is_file():
        from effasr.interop.nemo.importer import import_nemo

        found = import_nemo(source)
        model = ASRModel.from_state_dict(found.config, found.vocab_size, found.state)
        tokenizer, prompt = found.tokenizer, found.prompt
    else:
        model, tokenizer = _import_hugging_face(source)
    save_model(options.out, model, tokenizer, prompt)
    _say(f"{options.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    return 0


def _import_hugging_face(source: Path) -> tuple[ASRModel, Tokenizer]:
    from effasr.data.tokenizer import load_hugging_face
    from effasr.interop.huggingface.checkpoint import import_model
    from effasr.model.asr import ASRModel

    if not (source / "config.json").is_file():
        raise ValueError(
            f"{source} must be a .nemo file, or a folder with a Canary, a Parakeet or a Whisper of "
            "Hugging Face, but has no config.json: `hf download openai/whisper-small --local-dir "
            "FOLDER` fetches one."
        )
    tokenizer = load_hugging_face(source)
    model = ASRModel.from_state_dict(*import_model(source))
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"{source}: tokenizer.json must be the model's, but has {tokenizer.vocab_size} "
            f"tokens, and the model has {model.vocab_size}."
        )
    return model, tokenizer


def doctor(options: argparse.Namespace) -> int:
    """Show what this machine has."""
    from effasr.cli.doctor import report

    _say(report().text())
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")


def _note(command: str, text: str) -> None:
    sys.stderr.write(f"effasr {command}: {text}\n")


@contextmanager
def _counting(unit: str) -> Iterator[Callable[..., None]]:
    """Gives a function of what is done, and of how much there is, for a person at a terminal."""
    shown, due = sys.stderr.isatty(), 0.0

    def show(done: int, total: int | None = None) -> None:
        nonlocal due
        if shown and time.monotonic() >= due:
            due = time.monotonic() + 0.1
            sys.stderr.write(f"\r{done}{'' if total is None else f'/{total}'} {unit}")
            sys.stderr.flush()

    try:
        yield show
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

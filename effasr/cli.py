"""The command ``effasr``; also ``python -m effasr.cli``.

Each command imports what it needs when it runs, so that ``--help`` answers at once. Errors go to
standard error as one line. Exit codes: 0 done, 1 failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from effasr.inference.decoding_config import DecodingConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    from effasr_kernels import allow_reference_on_gpu

    # What no kernel serves yet runs all the same, and says so once for each operation.
    allow_reference_on_gpu()
    try:
        return options.action(options)
    except (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        return _fail(options.command, error, code=2)
    except RuntimeError as error:
        return _fail(options.command, error, code=1)
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has gone: nothing is wrong here.
        sys.stderr.close()
        return 0


def _fail(command: str, error: Exception, code: int) -> int:
    sys.stderr.write(f"effasr {command}: {' '.join(str(error).split())}\n")
    return code


def _say(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")


def _note(text: str) -> None:
    sys.stderr.write(text + "\n")


def _demo_data(options: argparse.Namespace) -> int:
    from effasr.data.demo import build

    corpus = build(
        options.out,
        multilingual=options.multilingual,
        utterances=options.utterances,
        progress=_counter("recordings"),
    )
    for name, split in corpus.statistics.items():
        _say(
            f"{name:6} {split.rows:6} utterances {split.hours:6.2f} h  {split.voices:4} voices  "
            f"{split.shortest_s:.1f} to {split.longest_s:.1f} s, median {split.median_s:.1f} s"
        )
    return 0


def _prepare(options: argparse.Namespace) -> int:
    from effasr.data.prepare import prepare
    from effasr.data.tokenizer import load_tokenizer

    report = prepare(
        options.source,
        options.out,
        tokenizer=load_tokenizer(options.tokenizer) if options.tokenizer else None,
        language=options.language,
        jobs=options.jobs,
        progress=_counter("utterances"),
    )
    _say(f"kept {report.kept.utterances} utterances, {report.kept.hours:.2f} h")
    for language, share in sorted(report.by_language.items()):
        _say(f"  {language:28} {share.utterances:8} {share.hours:10.2f} h")
    _say(f"dropped {report.dropped.utterances}, each listed in {options.out / 'dropped.jsonl'}")
    for reason, share in sorted(report.by_reason.items()):
        _say(f"  {reason:28} {share.utterances:8} {share.hours:10.2f} h")
    return 0


def _tokenizer(options: argparse.Namespace) -> int:
    from effasr.data.manifests import iterate, request
    from effasr.data.tokenizer import train_tokenizer

    texts: dict[str, list[str]] = {}
    spoken = set()
    for manifest in options.manifests:
        for cut in iterate(manifest, language=options.language):
            wanted = request(cut)
            spoken.add(wanted.source)
            texts.setdefault(wanted.target, []).append(cut.supervisions[0].text or "")
    tokenizer = train_tokenizer(
        texts,
        options.out,
        vocab_size=options.vocab_size,
        model_type=options.model_type,
        sources=sorted(spoken - texts.keys()),
    )
    _say(f"{options.out}: {tokenizer.vocab_size} tokens for {', '.join(sorted(texts))}")
    return 0


def _train(options: argparse.Namespace) -> int:
    from effasr import config
    from effasr.training.config import TrainConfig
    from effasr.training.trainer import run

    return run(config.load(TrainConfig, options.recipe, options.overrides))


def _evaluate(options: argparse.Namespace) -> int:
    from effasr.checkpoint import load_model, resolve
    from effasr.data.manifests import read
    from effasr.inference.evaluate import evaluate
    from effasr.inference.evaluation import save

    loaded = load_model(resolve(options.run), _device(options.device))
    cuts = list(read(options.manifest))
    count = _counter("utterances", total=len(cuts))
    evaluation = evaluate(
        loaded.model,
        loaded.tokenizer,
        cuts,
        normalizer=options.normalizer,
        config=_decoding(options),
        on_result=lambda _: count(),
    )
    folder = options.output or _evaluation_folder(options.run, options.manifest)
    save(evaluation, folder)
    _say(evaluation.text(worst=options.worst))
    _say(f"written to {folder}")
    return 0 if evaluation.utterances else 1


def _transcribe(options: argparse.Namespace) -> int:
    from effasr.checkpoint import load_model, resolve
    from effasr.data.prompt import Prompt
    from effasr.inference.transcribe import render, transcribe

    loaded = load_model(resolve(options.run), _device(options.device))
    source = options.language or loaded.prompt.source
    target = options.target_language or (source if options.language else loaded.prompt.target)
    prompt = Prompt(
        source=source,
        target=target,
        task="transcribe" if target == source else "translate",
        punctuation=(
            loaded.prompt.punctuation if options.punctuation is None else options.punctuation
        ),
    )
    results = transcribe(
        loaded.model, loaded.tokenizer, options.files, prompt=prompt, config=_decoding(options)
    )
    for result in results:
        sys.stdout.write(render(result, "jsonl" if options.json else "text"))
        sys.stdout.flush()
    _note(
        f"{results.audio_seconds:.1f} s of audio in {results.seconds:.1f} s, RTFx "
        f"{results.rtfx:.1f}" + (f", {results.failed} failed" if results.failed else "")
    )
    return 1 if results.failed else 0


def _import(options: argparse.Namespace) -> int:
    from effasr.checkpoint import save_model
    from effasr.data.tokenizer import HuggingFaceTokenizer
    from effasr.model.asr import ASRModel
    from effasr.model.huggingface import import_canary

    model = ASRModel.from_state_dict(*import_canary(options.source))
    save_model(options.out, model, HuggingFaceTokenizer(options.source))
    _say(f"{options.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    return 0


def _export(options: argparse.Namespace) -> int:
    from effasr.checkpoint import load_model, resolve
    from effasr.data.tokenizer import HuggingFaceTokenizer
    from effasr.model.huggingface import SpecialTokens, export_canary

    loaded = load_model(resolve(options.model))
    tokenizer = loaded.tokenizer
    start = tokenizer.prompt(loaded.prompt)[0]
    tokens = SpecialTokens(
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.specials.get("<|startoftranscript|>", start),
        eos_id=tokenizer.eos_id,
        decoder_start_id=start,
    )
    export_canary(loaded.model, options.out, tokens)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.save(options.out)
    else:
        _note("the tokenizer is effasr's own and stays behind: transformers cannot read it")
    _say(f"{options.out}: load it with CanaryForConditionalGeneration.from_pretrained")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from effasr.inference.doctor import report

    _say(report().text())
    return 0


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _decoding(options: argparse.Namespace) -> DecodingConfig:
    from effasr.inference.decoding_config import DecodingConfig

    return DecodingConfig(method=options.method, frame_budget=options.frame_budget)


def _evaluation_folder(run: Path, manifest: Path) -> Path:
    """runs/NAME/evaluation/SET, or beside a model directory that belongs to no run."""
    name = manifest.name.removesuffix(".gz").removesuffix(".jsonl")
    return run / "evaluation" / name


def _counter(unit: str, total: int = 0) -> Callable[..., None]:
    """A callback that counts on standard error, where a person is looking."""
    if not sys.stderr.isatty():
        return lambda *_: None
    done = 0

    def count(*numbers: int) -> None:
        nonlocal done
        done, everything = numbers if len(numbers) == 2 else (done + 1, total)
        end = "\n" if done >= everything else ""
        sys.stderr.write(f"\r{done}/{everything} {unit}{end}")
        sys.stderr.flush()

    return count


def _add_decoding(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: auto)")
    command.add_argument(
        "--method",
        choices=("auto", "attention", "ctc"),
        default="auto",
        help="auto: attention where the model has a decoder",
    )
    command.add_argument(
        "--frame-budget", type=int, default=4096, help="encoder frames decoded together"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="effasr",
        description="Train speech models without padding, evaluate them and transcribe.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, action: Callable[..., int], text: str) -> Any:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(action=action)
        return made

    one = command("prepare", _prepare, "Check recordings and transcripts before training.")
    one.add_argument("source", type=Path, help="NeMo JSONL, lhotse cuts, Kaldi or audio folder")
    one.add_argument("out", type=Path, help="folder for cuts, report and dropped utterances")
    one.add_argument("--tokenizer", type=Path, help="also check the text against this tokenizer")
    one.add_argument("--language", default="en", help="of lines that name none (default: en)")
    one.add_argument("--jobs", type=int, default=4, help="files read at a time")

    one = command("tokenizer", _tokenizer, "Train SentencePiece, one model per language.")
    one.add_argument("manifests", type=Path, nargs="+", metavar="MANIFEST")
    one.add_argument("out", type=Path, help="folder for the tokenizer")
    one.add_argument("--language", default="en", help="of lines that name none (default: en)")
    one.add_argument("--vocab-size", type=int, default=1024, help="pieces per language")
    one.add_argument("--model-type", choices=("unigram", "bpe"), default="bpe")

    one = command("demo-data", _demo_data, "Synthesise a small speech corpus, offline.")
    one.add_argument("out", type=Path)
    one.add_argument("--multilingual", action="store_true", help="English, German, and between")
    one.add_argument("--utterances", type=int, default=4000, help="recordings to train on")

    one = command("train", _train, "Train; under torchrun, on many GPUs.")
    one.add_argument("recipe", help="a YAML file, or the name of one of effasr's recipes")
    one.add_argument("overrides", nargs="*", metavar="path.to.field=value")

    one = command("evaluate", _evaluate, "Word error rate on a manifest.")
    one.add_argument("--run", type=Path, required=True, help="a run, or a model directory")
    one.add_argument("--manifest", type=Path, required=True)
    one.add_argument("--normalizer", default="basic", help="none, basic or whisper_english")
    one.add_argument("--output", type=Path, help="default: RUN/evaluation/MANIFEST")
    one.add_argument("--worst", type=int, default=5, help="utterances to show")
    _add_decoding(one)

    one = command("transcribe", _transcribe, "Transcribe audio files of any rate and length.")
    one.add_argument("--run", type=Path, required=True, help="a run, or a model directory")
    one.add_argument("files", nargs="+", metavar="FILE")
    one.add_argument("--language", help="spoken (default: what the model was trained on most)")
    one.add_argument("--target-language", help="written; another one translates")
    one.add_argument(
        "--punctuation",
        action=argparse.BooleanOptionalAction,
        help="ask for punctuation and capitals, or for plain text (default: as trained)",
    )
    one.add_argument("--json", action="store_true", help="one JSON object per line")
    _add_decoding(one)

    one = command("import", _import, "Make a model directory of a Hugging Face Canary.")
    one.add_argument("source", type=Path, metavar="HF_DIR")
    one.add_argument("out", type=Path)

    one = command("export", _export, "Write a model for Hugging Face's from_pretrained.")
    one.add_argument("model", type=Path, metavar="RUN_OR_MODEL")
    one.add_argument("out", type=Path, metavar="HF_DIR")

    command("doctor", _doctor, "What is installed, and which backend serves each operation.")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""``effasr export``: a model for Hugging Face's transformers or NeMo, or as ONNX graphs."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effasr.cli.options import RUN_HELP, at_least

if TYPE_CHECKING:
    from effasr.checkpoint import LoadedModel
    from effasr.evaluation.model_card import ModelCard


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    one = command(
        "export",
        run,
        "Write a model that transformers or NeMo load, or as ONNX graphs.",
        "README.md becomes its model card, with the results of `effasr evaluate --run RUN` for the",
        "weights that are exported. One that is there and was not written here is left alone.",
        "",
        "With --format onnx: encoder.onnx; of an attention decoder decoder_step.onnx; of a",
        "transducer predictor.onnx and joint.onnx; onnx.json, which says what goes in and comes",
        "out, and how to search; and the tokenizer. Where onnxruntime is installed, the graphs are",
        "compared with the model.",
        "",
        "With --format nemo, or where OUT ends in .nemo: that file, which NeMo's",
        "ASRModel.restore_from loads. The tokenizer must be that of a .nemo file, or of",
        "`effasr tokenizer`.",
    )
    one.add_argument("model", type=Path, metavar="RUN_OR_MODEL", help=RUN_HELP)
    one.add_argument("out", type=Path, metavar="OUT", help="the folder or .nemo file to write")
    one.add_argument(
        "--format",
        choices=("huggingface", "nemo", "onnx"),
        help="what to write (default: nemo where OUT ends in .nemo, else huggingface)",
    )
    one.add_argument(
        "--averaged",
        type=at_least(1),
        metavar="N",
        help="the mean of the weights of the last N checkpoints of a run, and of the statistics of "
        "its batch norms, in place of the best; often better than each, but to be evaluated anew",
    )
    one.add_argument(
        "--license",
        type=_license,
        metavar="LICENCE",
        help="as the hub names it, such as cc-by-4.0 or apache-2.0",
    )
    one.add_argument("--author", metavar="NAME", help="who made the model")


def run(options: argparse.Namespace) -> int:
    """Write weights, configuration, tokenizer and model card."""
    from effasr.checkpoint import load_model, resolve
    from effasr.data.tokenizer import HuggingFaceTokenizer, WhisperTokenizer
    from effasr.evaluation.model_card import is_replaceable
    from effasr.interop.huggingface.checkpoint import SpecialTokens, export_model
    from effasr.training.checkpointing.averaging import average, newest_checkpoints
    from effasr.transcription.json_files import write_text

    format_ = _format(options)
    if options.averaged is None:
        sources = [resolve(options.model)]
        loaded = load_model(sources[0])
    else:
        sources = newest_checkpoints(options.model, options.averaged)
        loaded = average(sources)
    if format_ == "onnx":
        return _onnx(options, loaded)
    if format_ == "nemo":
        return _nemo(options, loaded)
    tokenizer = loaded.tokenizer
    start = tokenizer.prompt(loaded.prompt)[0]
    tokens = SpecialTokens(
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.specials.get("<|startoftranscript|>", start),
        eos_id=tokenizer.eos_id,
        decoder_start_id=start,
        count=tokenizer.vocab_size,
        generation=(
            tokenizer.generation(loaded.prompt) if isinstance(tokenizer, WhisperTokenizer) else {}
        ),
    )
    loader = export_model(loaded.model, options.out, tokens)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.save(options.out)
    else:
        _note("the tokenizer stays behind, as transformers cannot read it")
    readme = options.out / "README.md"
    if is_replaceable(readme):
        write_text(readme, _card(options, loaded, sources, loader).text())
    else:
        _note(f"{readme} was not written here, and stays as it is")
    sys.stdout.write(f"{options.out}: load it with {loader}.from_pretrained\n")
    return 0


def _format(options: argparse.Namespace) -> str:
    """What is to be written.

    Raises:
        ValueError: ``OUT`` cannot be that, or an option is not of it.
    """
    out = options.out
    chosen = options.format or ("nemo" if out.suffix == ".nemo" else "huggingface")
    if chosen == "nemo" and (out.suffix != ".nemo" or out.is_dir()):
        raise ValueError(f"{out} must be a file, named with .nemo at its end.")
    if chosen != "nemo" and out.is_file():
        raise ValueError(f"{out} must be a folder, but is a file.")
    if any((out / name).exists() for name in ("model.yaml", "checkpoints")):
        raise ValueError(
            f"{out} must be a new folder or an earlier export, but is a model of effasr, "
            "which would be overwritten."
        )
    if chosen != "huggingface" and (options.license or options.author):
        raise ValueError(
            f"`--license` and `--author` must be left out for `--format {chosen}`, which has no "
            "model card."
        )
    return chosen


def _nemo(options: argparse.Namespace, loaded: LoadedModel) -> int:
    """Write a .nemo file."""
    from effasr.interop.nemo.export import export_nemo

    name = export_nemo(loaded.model, loaded.tokenizer, options.out, loaded.prompt)
    sys.stdout.write(f"{options.out}: load it with NeMo's {name}.restore_from\n")
    return 0


def _onnx(options: argparse.Namespace, loaded: LoadedModel) -> int:
    """Write the graphs, what they take, and the tokenizer."""
    import importlib.util

    from effasr.decoding.config import DecodingConfig
    from effasr.interop.onnx.export import check_onnx, export_onnx

    tokenizer = loaded.tokenizer
    texts: dict[str, Any] = {
        "tokens": tokenizer.vocab_size,
        "prompt": tokenizer.prompt(loaded.prompt),
        "eos_id": tokenizer.eos_id,
        "languages": list(tokenizer.languages),
    }
    if loaded.model.transducer is not None:
        texts["max_symbols"] = DecodingConfig().max_symbols
    graphs = export_onnx(loaded.model, options.out, texts)
    tokenizer.save(options.out)
    checked = importlib.util.find_spec("onnxruntime") is not None
    if checked:
        check_onnx(loaded.model, options.out)
    else:
        _note("the graphs are not checked, as onnxruntime is not installed")
    how = ", the same as the model in onnxruntime" if checked else ""
    *first, last = graphs
    names = f"{', '.join(first)} and {last}" if first else last
    sys.stdout.write(f"{options.out}: {names}{how}\n")
    return 0


def _card(
    options: argparse.Namespace, loaded: LoadedModel, sources: list[Path], loader: str
) -> ModelCard:
    from effasr import config
    from effasr.data.tokenizer import HuggingFaceTokenizer
    from effasr.evaluation.model_card import ModelCard, read_data, read_tested

    origin = options.model.resolve()
    is_run = (origin / "checkpoints").is_dir()
    step = re.fullmatch(r"step_(\d+)", sources[0].resolve().name)
    # A mean is none of the models that were evaluated, unless it is that of one.
    tested = is_run and options.averaged is None
    return ModelCard(
        name=origin.name,
        loader=loader,
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        languages=loaded.tokenizer.languages,
        configuration=config.dump(loaded.model.config),
        own_tokenizer=isinstance(loaded.tokenizer, HuggingFaceTokenizer),
        data=read_data(origin) if is_run else (),
        steps=int(step[1]) if step else None,
        averaged=options.averaged or 1,
        tested=read_tested(origin, sources[0] / "model.safetensors") if tested else (),
        license=options.license,
        author=options.author,
    )


def _license(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", text):
        raise argparse.ArgumentTypeError(
            f"must be a name such as cc-by-4.0, in small letters, but is {text!r}"
        )
    return text


def _note(text: str) -> None:
    sys.stderr.write(f"effasr export: {text}\n")

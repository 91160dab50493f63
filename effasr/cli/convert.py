"""``effasr import`` and ``effasr export``: conversion from and to Hugging Face, NeMo and ONNX."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from effasr.cli.options import (
    RUN_HELP,
    AddCommand,
    at_least,
    folder,
    log,
    print_line,
    print_next,
    seconds,
)
from effasr.cli.progress import reading, writing

if TYPE_CHECKING:
    from effasr.checkpoint import LoadedModel
    from effasr.data.prompt import Prompt
    from effasr.data.tokenizer import Tokenizer
    from effasr.model.asr import ASRModel
    from effasr_kernels import Context


def add_import(command: AddCommand) -> None:
    parser = command(
        "import",
        run_import,
        "Convert a model of NeMo, Hugging Face or faster-whisper to a folder.",
        "A .nemo file may hold a FastConformer with CTC, a transducer (RNN-T or TDT) or both, or a",
        "Canary; NeMo need not be installed. What is trained otherwise here is named.",
        "",
        "Of Hugging Face: CanaryForConditionalGeneration, CohereAsrForConditionalGeneration,",
        "HubertForCTC, MoonshineForConditionalGeneration, Nemotron3_5AsrForRNNT,",
        "NemotronAsrStreamingForRNNT, OmniASRForCTC, ParakeetForCTC, ParakeetForRNNT,",
        "ParakeetForTDT, Wav2Vec2ForCTC, WavLMForCTC, WhisperForConditionalGeneration.",
        example="effasr import canary-1b-flash.nemo models/canary",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="MODEL",
        help="a .nemo file, or a folder with one; or a folder with config.json, tokenizer.json and "
        "model.safetensors, or model.bin of faster-whisper",
    )
    parser.add_argument("out", type=folder, metavar="OUT", help="the model directory to write")
    parser.add_argument(
        "--language",
        metavar="CODE",
        help="language of MMS whose adapters are read, such as fra (default: that of its weights)",
    )


def run_import(options: argparse.Namespace) -> int:
    from effasr.checkpoint import save_model
    from effasr.data.tokenizer import NoTokenizer

    source = _model_in(options.source)
    with reading(source):
        model, tokenizer, prompt = _import(source, options.language)
    with writing(options.out, _bytes_of(model)):
        save_model(options.out, model, tokenizer, prompt)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print_line(f"{options.out}: {parameters / 1e6:.1f} M parameters")
    if isinstance(tokenizer, NoTokenizer):
        print_next(["init", "TRAIN", "--init-from", str(options.out), "--head", "ctc"])
        return 0
    print_next(
        ["evaluate", str(options.out), "DEV"],
        ["prepare", "SOURCE", "data/train", "--tokenizer", str(options.out / "tokenizer")],
    )
    return 0


def _bytes_of(model: ASRModel) -> int:
    return sum(value.nbytes for value in model.state_dict().values())


def _import(source: Path, language: str | None) -> tuple[ASRModel, Tokenizer, Prompt | None]:
    from effasr.interop.nemo.archive import CONFIG
    from effasr.model.asr import ASRModel

    if source.is_file() or source.suffix == ".nemo" or (source / CONFIG).is_file():
        from effasr.interop.nemo.checkpoint import import_nemo

        if language is not None:
            raise ValueError(f"`--language` must be left out for {source}: it is for MMS alone.")
        nemo = import_nemo(source)
        model = ASRModel.from_state_dict(nemo.config, nemo.vocab_size, nemo.state)
        return model, nemo.tokenizer, nemo.prompt
    return _import_hugging_face(source, language)


def _model_in(source: Path) -> Path:
    """The .nemo file of a folder that has no other model, as NVIDIA publishes some."""
    from effasr.interop.nemo.archive import CONFIG

    if not source.is_dir() or any((source / name).is_file() for name in (CONFIG, "config.json")):
        return source
    files = sorted(source.glob("*.nemo"))
    if not files and (saved := [path.name for path in source.glob("checkpoint-*")]):
        last = max(saved, key=lambda name: (len(name), name))
        raise ValueError(
            f"{source} must be one model, but has {len(saved)} checkpoints of transformers' "
            f"Trainer: name one of them, such as {source / last}."
        )
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ValueError(f"{source} must have one .nemo file, but has {names}: name one of them.")
    return files[0] if files else source


def _import_hugging_face(
    source: Path, language: str | None
) -> tuple[ASRModel, Tokenizer, Prompt | None]:
    from effasr.data.languages import AUTO
    from effasr.data.prompt import Prompt
    from effasr.data.tokenizer import (
        CharacterTokenizer,
        NoTokenizer,
        WhisperTokenizer,
        load_hugging_face,
    )
    from effasr.interop.huggingface.checkpoint import CLASSES, import_model
    from effasr.interop.huggingface.ctranslate2 import is_ctranslate2
    from effasr.interop.huggingface.files import check_tokenizer, read_config, read_prompt_settings
    from effasr.model.asr import ASRModel

    if (source / "adapter_config.json").is_file():
        raise ValueError(
            f"{source} must be a whole model, but is an adapter of one: merge them with peft: "
            "`model = PeftModel.from_pretrained(base, FOLDER).merge_and_unload()`, then "
            "`model.save_pretrained(OUT)`, and copy the tokenizer of the base model into OUT."
        )
    if not (source / "config.json").is_file():
        raise ValueError(
            f"{source} must be a .nemo file, or a folder with a Canary, a Parakeet or a Whisper of "
            "Hugging Face, but has no config.json: `hf download openai/whisper-small --local-dir "
            "FOLDER` fetches one."
        )
    if not is_ctranslate2(source):
        read_config(source, *CLASSES)
    check_tokenizer(source)
    files = any((source / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    tokenizer = load_hugging_face(source, language) if files else NoTokenizer()
    blank = tokenizer.blank if isinstance(tokenizer, CharacterTokenizer) else None
    model = ASRModel.from_state_dict(*import_model(source, language, blank))
    if blank is not None and model.vocab_size == 1 < tokenizer.vocab_size:
        log("import", f"{source / 'vocab.json'} is not used, as the weights have no head for it")
        tokenizer = NoTokenizer()
    if not files and model.vocab_size > 1:
        raise ValueError(
            f"{source / 'vocab.json'}: there is no such file: copy it and tokenizer_config.json "
            "from the model that was fine-tuned."
        )
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"{source}: the tokenizer must be the model's, but has {tokenizer.vocab_size} "
            f"tokens, and the model has {model.vocab_size}."
        )
    prompts = model.config.language_prompt
    if prompts is not None and AUTO in prompts.languages:
        return model, tokenizer, Prompt(AUTO, AUTO)
    if not isinstance(tokenizer, WhisperTokenizer):
        return model, tokenizer, None
    return model, tokenizer, tokenizer.trained_prompt(read_prompt_settings(source))


def add_export(command: AddCommand) -> None:
    parser = command(
        "export",
        run_export,
        "Write a model that transformers or NeMo load, or as ONNX graphs.",
        "README.md, of OUT.nemo OUT.md, becomes its model card, with the results of `effasr",
        "evaluate RUN` for the weights that are exported. One that is there and was not written",
        "here is left alone.",
        "",
        "With --format onnx: encoder.onnx; of an attention decoder decoder_step.onnx; of a",
        "transducer predictor.onnx and joint.onnx; onnx.json, which says what goes in and comes",
        "out, and how to search; the tokenizer; and, but for a transducer alone, infer.py, which",
        "transcribes with them. Where onnxruntime is installed, the graphs are compared with the",
        "model. Of a model that decodes streams, encoder_step.onnx encodes the next chunk of each",
        "stream, with its caches as inputs and outputs.",
        "",
        "With --format sherpa-onnx: model.onnx of a CTC head; encoder.onnx, decoder.onnx and",
        "joiner.onnx of a transducer; and tokens.txt, as sherpa-onnx reads NeMo's models. Of a",
        "model that decodes streams, the first graph encodes the next chunk of each stream.",
        "",
        "With --format nemo, or where OUT ends in .nemo: that file, which NeMo's",
        "ASRModel.restore_from loads. The tokenizer must be that of a .nemo file, or of",
        "`effasr tokenizer`.",
        example="effasr export runs/mine mine.nemo",
    )
    parser.add_argument("model", type=Path, metavar="RUN_OR_MODEL", help=RUN_HELP)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder or .nemo file to write")
    parser.add_argument(
        "--format",
        choices=("huggingface", "nemo", "onnx", "sherpa-onnx", "ctranslate2", "effasr"),
        help="what to write, effasr for a model directory (default: nemo where OUT ends in .nemo, "
        "else huggingface)",
    )
    parser.add_argument(
        "--head",
        choices=("decoder", "transducer", "ctc"),
        help="the only output to export (default: all that the format holds)",
    )
    parser.add_argument(
        "--merge-language",
        metavar="LANG",
        help="language whose adapters are merged into the weights, of a model that was trained "
        "with lora.by_language",
    )
    parser.add_argument(
        "--quantization",
        choices=("float32", "float16", "bfloat16", "int8", "int8_float16", "int8_float32"),
        metavar="TYPE",
        help="type of the weights with --format ctranslate2: float32, float16 (the default), "
        "bfloat16, int8, int8_float16 or int8_float32",
    )
    parser.add_argument(
        "--averaged",
        type=at_least(1),
        metavar="N",
        help="average of the weights and batch-norm statistics of the last N checkpoints of a run, "
        "in place of the best checkpoint; `effasr evaluate --averaged N` measures it",
    )
    parser.add_argument(
        "--license",
        type=_license,
        metavar="LICENCE",
        help="license identifier of the Hugging Face hub, such as cc-by-4.0 or apache-2.0",
    )
    parser.add_argument("--author", metavar="NAME", help="author of the model")
    parser.add_argument(
        "--base-model",
        metavar="MODEL",
        help="identifier on the Hugging Face hub of the model that training began from, such as "
        "openai/whisper-small, for the model card",
    )
    parser.add_argument(
        "--latency",
        type=seconds,
        metavar="S",
        help="longest chunk of a model that decodes streams, such as 480ms, with --format onnx or "
        "sherpa-onnx (default: its first)",
    )


def run_export(options: argparse.Namespace) -> int:
    from effasr.training.checkpointing.averaging import load_run

    format_ = _format(options)
    loaded, sources = load_run(options.model, options.averaged, progress=reading)
    loaded = loaded if options.head is None else loaded.with_head(options.head)
    if options.merge_language is not None:
        loaded = loaded.with_language(options.merge_language)
    if loaded.model.language_model is not None and format_ != "huggingface":
        raise ValueError(
            f"`--format` must be huggingface for a model with a language model, but is {format_}."
        )
    with writing(options.out, _bytes_of(loaded.model)):
        print_line(f"{options.out}: {_WRITERS[format_](options, loaded, sources)}")
    return 0


def _hugging_face(options: argparse.Namespace, loaded: LoadedModel, sources: list[Path]) -> str:
    if loaded.model.language_model is not None:
        from effasr.interop.huggingface.language_model import export_speech_llm
        from effasr.training.checkpointing.export_folder import export_folder

        with export_folder(options.out) as out:
            export_speech_llm(loaded.model, out, loaded.tokenizer)
        return (
            f"load the language model with {loaded.model.language_model.loader}.from_pretrained; "
            "README.md describes how to add the speech"
        )
    from effasr.data.tokenizer import WhisperTokenizer
    from effasr.training.checkpointing.export_folder import export_folder

    readme = options.out / "README.md"
    # Other models have none, and readers prefer shards to a whole file.
    dropped = "generation_config.json", "processor_config.json", "model.safetensors.index.json"
    with export_folder(options.out, dropped) as out:
        loader = _write_hugging_face(loaded, out)
        settings: dict[str, Any] = {
            "has_tokenizer": any((out / x).is_file() for x in ("tokenizer.json", "vocab.json"))
        }
        prompt = loaded.tokenizer.prompt(loaded.prompt)
        # That of a Whisper is in its settings, unless it has learnt another tokenizer, and a prompt
        # of one token is the start token of `generate`.
        in_settings = isinstance(loaded.tokenizer, WhisperTokenizer) or len(prompt) == 1
        if loader.endswith("ForConditionalGeneration") and not in_settings:
            settings["prompt"] = tuple(prompt)
        _write_card(options, loaded, sources, out / readme.name, readme, loader, **settings)
    prompted = " and generate with the prompt in README.md" if "prompt" in settings else ""
    return f"load it with {loader}.from_pretrained{prompted}"


def _write_hugging_face(loaded: LoadedModel, out: Path) -> str:
    """Write weights, configuration and tokenizer; return the class that loads them."""
    from effasr.data.tokenizer import CharacterTokenizer, WhisperTokenizer
    from effasr.data.tokenizer.sentence_piece import AggregateTokenizer
    from effasr.interop.huggingface.checkpoint import export_model
    from effasr.interop.huggingface.files import SpecialTokens
    from effasr.interop.huggingface.sentence_piece import export_sentence_piece

    tokenizer = loaded.tokenizer
    start = tokenizer.prompt(loaded.prompt)[0]
    tokens = SpecialTokens(
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.specials.get("<|startoftranscript|>", start),
        eos_id=tokenizer.eos_id,
        decoder_start_id=start,
        blank_id=tokenizer.blank if isinstance(tokenizer, CharacterTokenizer) else 0,
        count=tokenizer.vocab_size,
        generation=(
            tokenizer.generation(loaded.prompt) if isinstance(tokenizer, WhisperTokenizer) else {}
        ),
    )
    loader = export_model(loaded.model, out, tokens)
    if not isinstance(tokenizer, AggregateTokenizer):
        tokenizer.save(out)
        return loader
    has_blank = loader.startswith(("Parakeet", "Nemotron"))
    pad_id = tokenizer.vocab_size if has_blank else tokens.pad_id
    try:
        export_sentence_piece(
            tokenizer, out, pad_id=pad_id, bos_id=tokens.bos_id, eos_id=tokens.eos_id
        )
    except ImportError as error:
        remedy = "pip install 'effasr[huggingface]', and export again"
        log("export", f"the tokenizer is not exported ({error}): {remedy}")
    except ValueError as error:
        log("export", f"the tokenizer is not exported: {error}")
    return loader


def _format(options: argparse.Namespace) -> str:
    """The format to write, after checks of ``OUT`` and of the options."""
    out = options.out
    chosen = options.format or ("nemo" if out.suffix == ".nemo" else "huggingface")
    if chosen == "nemo" and (out.suffix != ".nemo" or out.is_dir()):
        raise ValueError(
            f"`OUT` must be a file that ends in .nemo for `--format nemo`, but is {out}: name "
            "another."
        )
    if chosen != "nemo" and out.is_file():
        raise ValueError(f"`OUT` must be a folder, but is the file {out}: name another.")
    if any((out / name).exists() for name in ("model.yaml", "checkpoints")):
        raise ValueError(
            f"{out} must be a new folder or an earlier export, but is a model of effasr, "
            "which would be overwritten."
        )
    if chosen != "ctranslate2" and options.quantization is not None:
        raise ValueError(
            f"`--quantization` must be left out for `--format {chosen}`, but is "
            f"{options.quantization}: the other formats have float32 weights."
        )
    if chosen not in ("onnx", "sherpa-onnx") and options.latency is not None:
        raise ValueError(
            f"`--latency` must be left out for `--format {chosen}`, but is {options.latency:g} s: "
            "only ONNX graphs have chunks."
        )
    return chosen


def _nemo(options: argparse.Namespace, loaded: LoadedModel, sources: list[Path]) -> str:
    from effasr.interop.nemo.checkpoint import export_nemo

    name = export_nemo(loaded.model, loaded.tokenizer, options.out, loaded.prompt)
    card = options.out.with_suffix(".md")
    usage = (
        f"from nemo.collections.asr.models import {name}",
        "",
        f"model = {name}.restore_from({options.out.name!r})",
        'print(model.transcribe(["recording.wav"]))  # mono, 16 kHz',
    )
    text = "\n".join(("```python", *usage, "```"))
    _write_card(options, loaded, sources, card, card, name, library="nemo", usage=text)
    return f"load it with NeMo's {name}.restore_from; {card} is its model card"


def _onnx(options: argparse.Namespace, loaded: LoadedModel, sources: list[Path]) -> str:
    import importlib.util

    from effasr.data.tokenizer import HuggingFaceTokenizer
    from effasr.decoding.config import DecodingConfig
    from effasr.interop.onnx.export import check_onnx, earlier_graphs, export_onnx
    from effasr.training.checkpointing.export_folder import export_folder

    tokenizer = loaded.tokenizer
    texts: dict[str, Any] = {
        "tokens": tokenizer.vocab_size,
        "prompt": tokenizer.prompt(loaded.prompt),
        "eos_id": tokenizer.eos_id,
        "languages": list(tokenizer.languages),
    }
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        texts["pieces"] = tokenizer.pieces()
    if loaded.model.transducer is not None:
        texts["max_symbols"] = DecodingConfig().max_symbols
    context = _context(options, loaded)
    checked = importlib.util.find_spec("onnxruntime") is not None
    with export_folder(options.out, earlier_graphs(options.out)) as out:
        graphs = export_onnx(loaded.model, out, texts, context)
        tokenizer.save(out)
        graph_names = ", ".join(f"`{name}`" for name in graphs)
        usage = f"onnx.json describes the inputs and outputs of {graph_names}."
        if (out / "infer.py").exists():
            packages = "numpy onnxruntime soundfile tokenizers"
            command = f"pip install {packages}\npython infer.py recording.wav  # mono, 16 kHz"
            usage = f"```sh\n{command}\n```\n\n{usage}"
        readme = options.out / "README.md"
        settings = {"library": "onnx", "usage": usage}
        _write_card(options, loaded, sources, out / readme.name, readme, "ONNX", **settings)
        if checked:
            check_onnx(loaded.model, out, context)
        else:
            log("export", "the graphs are not checked, because onnxruntime is not installed")
    *first, last = graphs
    names = f"{', '.join(first)} and {last}" if first else last
    return f"{names}{', the same as the model in onnxruntime' if checked else ''}"


def _context(options: argparse.Namespace, loaded: LoadedModel) -> Context | None:
    """The context of the graphs of a model that decodes streams, else None."""
    from effasr.transcription.online import context_for, is_streamable

    if options.latency is None and not is_streamable(loaded.model):
        return None
    return context_for(loaded.model, options.latency)


def _sherpa(options: argparse.Namespace, loaded: LoadedModel, sources: list[Path]) -> str:
    from effasr.data.tokenizer.sentence_piece import AggregateTokenizer
    from effasr.interop.onnx.sherpa import export_sherpa
    from effasr.training.checkpointing.export_folder import export_folder

    if not isinstance(loaded.tokenizer, AggregateTokenizer):
        raise ValueError(
            "`tokenizer` must be of SentencePiece for sherpa-onnx, but is a "
            f"{type(loaded.tokenizer).__name__}."
        )
    context = _context(options, loaded)
    kind = "OfflineRecognizer" if context is None else "OnlineRecognizer"
    with export_folder(options.out) as out:
        graphs = export_sherpa(loaded.model, out, loaded.tokenizer.pieces(), context)
        make, files = f"{kind}.from_nemo_ctc", 'model="model.onnx"'
        if "encoder.onnx" in graphs:
            make = f"{kind}.from_transducer"
            files = ", ".join(f'{x}="{x}.onnx"' for x in ("encoder", "decoder", "joiner"))
            files += "" if context is not None else ', model_type="nemo_transducer"'
        sizes = f'tokens="tokens.txt", feature_dim={loaded.model.config.features.mel_bins}'
        call = f"recognizer = sherpa_onnx.{make}(\n    {files},\n    {sizes},\n)"
        usage = f"```python\nimport sherpa_onnx\n\n{call}\n```"
        readme = options.out / "README.md"
        settings = {"library": "sherpa-onnx", "usage": usage}
        _write_card(options, loaded, sources, out / readme.name, readme, kind, **settings)
    return f"{', '.join(graphs)} and tokens.txt, for sherpa-onnx's {kind}"


def _ctranslate2(options: argparse.Namespace, loaded: LoadedModel, sources: list[Path]) -> str:
    from effasr.interop.huggingface.ctranslate2 import check_ctranslate2, write_ctranslate2
    from effasr.training.checkpointing.export_folder import export_folder

    check_ctranslate2(loaded.model, loaded.tokenizer)
    quantization = options.quantization or "float16"
    with TemporaryDirectory(prefix="effasr-") as folder, export_folder(options.out) as out:
        _write_hugging_face(loaded, Path(folder))
        write_ctranslate2(Path(folder), out, quantization)
        lines = (
            "from faster_whisper import WhisperModel",
            "",
            'parts, _ = WhisperModel(".").transcribe("recording.wav")',
            'print("".join(part.text for part in parts))',
        )
        readme, usage = options.out / "README.md", "\n".join(("```python", *lines, "```"))
        settings = {"library": "ctranslate2", "usage": usage}
        _write_card(options, loaded, sources, out / readme.name, readme, "WhisperModel", **settings)
    return f"load it with faster_whisper.WhisperModel({str(options.out)!r}), {quantization}"


def _effasr(options: argparse.Namespace, loaded: LoadedModel, sources: list[Path]) -> str:
    from effasr.checkpoint import save_model

    save_model(options.out, loaded.model, loaded.tokenizer, loaded.prompt)
    return "a model directory, for other commands and `init_from`"


_WRITERS = {
    "effasr": _effasr,
    "huggingface": _hugging_face,
    "nemo": _nemo,
    "onnx": _onnx,
    "sherpa-onnx": _sherpa,
    "ctranslate2": _ctranslate2,
}


def _write_card(
    options: argparse.Namespace,
    loaded: LoadedModel,
    sources: list[Path],
    path: Path,
    earlier: Path,
    loader: str,
    **settings: Any,
) -> None:
    """Write a model card, unless ``earlier`` was not written here."""
    from effasr import config
    from effasr.evaluation.model_card import ModelCard, is_replaceable, read_data, read_tested
    from effasr.transcription.json_files import write_text

    if not is_replaceable(earlier):
        log("export", f"{earlier} is kept, because effasr export did not write it")
        return
    origin = options.model.resolve()
    is_run = (origin / "checkpoints").is_dir()
    step = re.fullmatch(r"step_(\d+)", sources[0].resolve().name)
    # An average differs from the evaluated models, unless it averages only one.
    tested = is_run and options.averaged is None
    data, base = read_data(origin) if is_run else ((), None)
    card = ModelCard(
        name=origin.name,
        loader=loader,
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        languages=loaded.tokenizer.languages,
        configuration=config.dump(loaded.model.config),
        base=base,
        base_model=options.base_model,
        data=data,
        steps=int(step[1]) if step else None,
        averaged=options.averaged or 1,
        tested=read_tested(origin, sources[0] / "model.safetensors") if tested else (),
        license=options.license,
        author=options.author,
        **settings,
    )
    write_text(path, card.text())


def _license(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", text):
        raise argparse.ArgumentTypeError(
            f"must be a name such as cc-by-4.0, in small letters, but is {text!r}"
        )
    return text

"""Model card of an exported model: README.md in the format of Hugging Face's hub."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from effasr.config import RUN_CONFIG
from effasr.data.checksums import sha256
from effasr.evaluation.result import SUMMARY, read_summary, set_name
from effasr.evaluation.tables import percent
from effasr.untrusted.display import escape_line
from effasr.untrusted.documents import WRONG_VALUES, dump_yaml, read_json_object, read_yaml
from effasr.untrusted.files import read_text

_log = logging.getLogger(__name__)

# Characters that begin code, emphasis, a link, a heading or a list in Markdown.
_SYNTAX = re.compile(r"([\\`*\[\]]|^[#>+-])")

MARK = "<!-- Written by `effasr export`, which replaces the file as long as this line is in it. -->"


@dataclass(frozen=True, slots=True)
class TestedSet:
    name: str
    result: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    name: str
    loader: str  # class that loads the model, or program
    parameters: int
    languages: Sequence[str]  # codes of its output languages
    configuration: str  # configuration of the model as YAML
    has_tokenizer: bool = True  # whether the folder has one that transformers reads
    prompt: tuple[int, ...] = ()  # tokens before the text, where `generate` does not know them
    library: str = "transformers"
    usage: str = ""  # how to call it, where that is not by transformers
    base: str | None = None  # model that its training began from
    base_model: str | None = None  # its identifier of the hub, such as ``openai/whisper-small``
    data: Sequence[str] = ()
    steps: int | None = None  # updates of its training
    averaged: int = 1
    tested: Sequence[TestedSet] = ()  # results of exactly these weights
    license: str | None = None  # license name of the hub, such as ``cc-by-4.0``
    author: str | None = None

    def text(self) -> str:
        metadata: dict[str, Any] = {}
        if self.license:
            metadata["license"] = self.license
        if self.languages:
            metadata["language"] = list(self.languages)
        if self.base_model:
            metadata["base_model"] = self.base_model
        metadata |= {
            "library_name": self.library,
            "pipeline_tag": "automatic-speech-recognition",
            "tags": ["automatic-speech-recognition", "speech", "effasr"],
        }
        results = [row for item in self.tested for row in _metadata(item)]
        if results:
            metadata["metrics"] = list(dict.fromkeys(row["metrics"][0]["type"] for row in results))
            metadata["model-index"] = [{"name": self.name, "results": results}]
        front = dump_yaml(metadata)
        fence = "```"
        while fence in self.configuration:
            fence += "`"
        facts = [f"- {self.parameters / 1e6:.1f} M parameters, `{self.loader}`"]
        if self.languages:
            facts.append(f"- Languages: {', '.join(map(_text, self.languages))}")
        if self.base or self.base_model:
            facts.append(f"- Trained from: {_text(self.base_model or self.base)}")
        if self.data:
            facts.append(f"- Trained on: {', '.join(map(_text, self.data))}")
        if self.steps is not None:
            facts.append(f"- Updates: {self.steps}")
        if self.averaged > 1:
            facts.append(f"- Weights: the mean of the last {self.averaged} checkpoints")
        parts = [
            f"---\n{front}---\n\n{MARK}",
            f"# {_text(self.name)}",
            "A speech recognition model, trained with effasr.",
            "\n".join(facts),
            self._usage(),
            self._results(),
            f"## Configuration\n\n{fence}yaml\n{self.configuration.strip()}\n{fence}",
            "## Licence and author\n\n"
            f"Licence: {_text(self.license or '') or 'not stated (`effasr export --license`)'}. "
            f"Author: {_text(self.author or '') or 'not stated (`effasr export --author`)'}.",
        ]
        return "\n\n".join(parts) + "\n"

    def _usage(self) -> str:
        if self.usage:
            return f"## Use\n\n{self.usage}"
        # Wav2Vec2ForCTC and HubertForCTC have no `generate`.
        has_generate = self.loader.startswith("Parakeet") or not self.loader.endswith("ForCTC")
        call = "model.generate(**inputs)" if has_generate else "model(**inputs).logits.argmax(-1)"
        if self.prompt:
            call = "model.generate(**inputs, decoder_input_ids=prompt)"
        lines = [
            "import soundfile",
            f"from transformers import AutoFeatureExtractor, AutoTokenizer, {self.loader}",
            "",
            'samples, rate = soundfile.read("recording.wav", dtype="float32")  # mono, 16 kHz',
            'extractor = AutoFeatureExtractor.from_pretrained(".")',
            f'model = {self.loader}.from_pretrained(".")',
            'inputs = extractor(samples, sampling_rate=rate, return_tensors="pt")',
            f"tokens = {call}",
        ]
        if self.prompt:
            lines[:1] = ["import soundfile", "import torch"]
            lines[-1:-1] = [f"prompt = torch.tensor([{list(self.prompt)}])"]
        note = (
            "Its tokenizer is effasr's own, which transformers cannot read: it comes with the "
            "model directory of effasr, not with this folder."
        )
        if self.has_tokenizer:
            note = "It runs in the folder of this file."
            decode = "decode(tokens[0], skip_special_tokens=True)"
            lines.append(f'print(AutoTokenizer.from_pretrained(".").{decode})')
        else:
            lines = [line.replace(" AutoTokenizer,", "") for line in lines]
        return "\n".join(["## Use", "", "```python", *lines, "```", "", note])

    def _results(self) -> str:
        if not self.tested:
            return (
                "## Results\n\nNone of these weights: `effasr evaluate` makes them, and "
                "`effasr export` of the run puts them here."
            )
        rows = [
            "| set | utterances | words | WER % | 95 % interval | CER % | normaliser | search | "
            "RTFx |",
            "| --- | ---: | ---: | ---: | ---: | ---: | --- | --- | ---: |",
        ]
        for tested in self.tested:
            result = tested.result
            rows.append(
                f"| {_cell(tested.name)} | {result['utterances']} | {result['words']} | "
                f"{percent(result['wer'])} | {_interval(result.get('wer_interval'))} | "
                f"{percent(result['cer'])} | {_cell(result['normalizer'])} | "
                f"{_cell(result.get('search', ''))} | {result['rtfx']:g} |"
            )
        note = (
            "RTFx is seconds of audio per second, loading included, on the machine that evaluated."
        )
        translated = [
            f"| {_cell(tested.name)} | {_cell(group)} | {row['utterances']} | {row['bleu']:.2f} | "
            f"{row['bleu_interval'][0]:.2f} to {row['bleu_interval'][1]:.2f} | {row['chrf']:.2f} | "
            f"{_cell(' and '.join(map(str, row['signatures'].values())))} |"
            for tested in self.tested
            for group, row in _translations(tested.result).items()
        ]
        if translated:
            head = "| set | languages | translations | BLEU | 95 % interval | chrF | signatures |"
            rows += ["", head, "| --- | --- | ---: | ---: | ---: | ---: | --- |", *translated]
        return "\n".join(["## Results", "", *rows, "", note])


def read_tested(run: Path, weights: Path) -> list[TestedSet]:
    """Return a run's evaluations of a file's weights, without validations; others warn."""
    tested, paths = [], sorted((run / "evaluation").glob(f"*/{SUMMARY}"))
    # Not by the ages of the files: copies have other ones, and a clock may have been set.
    local = sha256(weights) if paths else None
    for path in paths:
        try:
            result = read_summary(path.parent)
            if "model" in result and result["model"] is None:
                continue  # A validation of training, or an average of checkpoints.
            if result.get("model") != local:
                _log.warning(
                    "%s is not known to be of %s, and is left out: evaluate again.", path, weights
                )
                continue
            tested.append(TestedSet(path.parent.name, _checked(result)))
        except ValueError as error:
            message = f"{path} must be what `effasr evaluate` wrote: {error} Evaluate again."
            raise ValueError(message) from error
    return tested


def read_data(run: Path) -> tuple[list[str], str | None]:
    """Return a run's training sets, with their hours where known, and the model it began from.

    Names are the last parts of paths, which stay private.
    """
    path = run / RUN_CONFIG
    if not path.is_file():
        return [], None
    try:
        config = read_yaml(path, has_checksum=True)
        data, base = config["data"], config.get("init_from")
        train = data.get("train") or ()
        paths = [train] if isinstance(train, str) else list(train)
        mix = data.get("mix") or {}
        names = [f"{set_name(each)}{_hours(each)}" for each in paths]
        base = None if base is None else Path(base).name
        return list(dict.fromkeys([*names, *(mix.get("sources") or ())])), base
    except WRONG_VALUES as error:
        raise ValueError(
            f"{path} must have the configuration of the run, but {type(error).__name__}: {error}: "
            f"restore it, or remove it to leave the training sets out of the model card."
        ) from error


def _hours(data: str) -> str:
    """Return the hours of a prepared folder that is still there."""
    try:
        return f" ({read_json_object(Path(data) / 'report.json')['kept']['hours']:,.1f} h)"
    except (OSError, *WRONG_VALUES):
        return ""


def is_replaceable(path: Path) -> bool:
    """Return whether a README.md may be overwritten: it is missing, or was written here."""
    if not path.exists():
        return True
    try:
        return MARK in read_text(path)
    except (OSError, ValueError):
        # Not written here: a folder, a pipe, or no text.
        return False


def _checked(result: dict[str, Any]) -> dict[str, Any]:
    """Check the values of ``wer.json`` that the card shows."""
    for name in ("utterances", "words", "wer", "cer", "rtfx"):
        value = result.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number and not (value is None and name in ("wer", "cer")):
            raise ValueError(f"`{name}` must be a number, but is {repr(value)[:60]}.")
    bounds = result.get("wer_interval")
    if bounds is not None and not (
        isinstance(bounds, list) and all(isinstance(item, int | float) for item in bounds)
    ):
        raise ValueError(f"`wer_interval` must be numbers, but is {repr(bounds)[:60]}.")
    if not isinstance(result.get("normalizer"), str):
        raise ValueError("`normalizer` must be text.")
    for row in _translations(result).values():
        scores = row.get("utterances"), row["bleu"], row.get("chrf"), *row["bleu_interval"]
        if not all(isinstance(score, int | float) for score in scores):
            raise ValueError(f"`groups` must have numbers of translations, but has {scores}.")
    return result


def _translations(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of each pair of languages."""
    return {k: row for k, row in result.get("groups", {}).items() if "bleu" in row}


def _metadata(tested: TestedSet) -> Iterator[dict[str, Any]]:
    """Yield the results of a set for the front matter, by task."""
    result, dataset = tested.result, {"type": tested.name, "name": tested.name}
    if result.get("wer") is not None and result.get("rate") != "bleu":
        name, value = f"WER % (normaliser {result['normalizer']})", round(100 * result["wer"], 2)
        yield {
            "task": {"type": "automatic-speech-recognition", "name": "Speech recognition"},
            "dataset": dataset,
            "metrics": [{"type": "wer", "value": value, "name": name}],
        }
    for group, row in _translations(result).items():
        name = f"BLEU {group} ({row['signatures']['bleu']})"
        yield {
            "task": {"type": "automatic-speech-translation", "name": "Speech translation"},
            "dataset": dataset,
            "metrics": [{"type": "bleu", "value": round(row["bleu"], 2), "name": name}],
        }


def _interval(bounds: Sequence[float] | None) -> str:
    return "-" if bounds is None else " to ".join(map(percent, bounds))


def _text(text: object) -> str:
    """Return a text as Markdown that shows it on one line, without links, code and HTML."""
    return _SYNTAX.sub(r"\\\1", escape(escape_line(str(text)), quote=False))


def _cell(text: object) -> str:
    return _text(text).replace("|", "\\|")

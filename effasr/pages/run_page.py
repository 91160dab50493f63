"""The page of a run, or of a model directory: curves, results, worst utterances, configuration."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from lhotse.cut import Cut

from effasr import config as configuration
from effasr.config import RUN_CONFIG
from effasr.data.locks import LOCK
from effasr.evaluation.alignment import align
from effasr.evaluation.metric import BY_NAME, Metric
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.result import (
    HYPOTHESES,
    SUMMARY,
    Evaluation,
    ScoredUtterance,
    free_set_name,
    read_summary,
)
from effasr.evaluation.tables import percent
from effasr.evaluation.wer import ErrorCounts, count_errors, total
from effasr.pages.audio import NOTE, Players, cuts_of
from effasr.pages.markup import (
    Cell,
    Series,
    charts,
    document,
    isolated,
    item,
    lead,
    line_chart,
    paragraph,
    table,
)
from effasr.training.config import TrainConfig
from effasr.training.loss import LOSSES
from effasr.training.run_dir.run_directory import (
    DROPPED,
    METRICS,
    SKIPPED,
    UNREADABLE,
    VALIDATION,
    WARNINGS,
    read_lines,
)
from effasr.untrusted.documents import WRONG_VALUES, read_yaml

_COLORS = ("--blue", "--orange", "--aqua", "--violet", "--magenta", "--green", "--red", "--yellow")
_WORST, _EXAMPLES = 10, 30  # utterances of a set, and validations, that are shown
_ROWS = 12  # speakers and words of a set that are shown
_LENGTHS = (0, 2, 5, 10, 20, math.inf)  # seconds
_ALIGNED = lead(
    "After the normaliser: struck out is what the reference has and was not heard, underlined is "
    "what was heard in its place or in addition."
)


@dataclass(slots=True)
class _Run:
    path: Path
    metrics: list[dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    validations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by set
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)  # by folder
    missing: list[str] = field(default_factory=list)  # what the directory lacks

    @classmethod
    def read(cls, path: Path) -> "_Run":
        run = cls(path, _lines(path / METRICS, "step", "step_s"))
        for line in _lines(path / VALIDATION, "step", "set"):
            run.validations.setdefault(str(line["set"]), []).append(line)
        for file in sorted(path.glob(f"evaluation/*/{SUMMARY}")):
            try:
                run.evaluations[file.parent.name] = read_summary(file.parent)
            except (OSError, ValueError) as error:
                run.missing.append(f"{file} cannot be read: {error}")
        try:
            run.config = dict(read_yaml(path / RUN_CONFIG, has_checksum=True))
        except (OSError, *WRONG_VALUES) as error:
            run.missing.append(f"No configuration: {error}")
        for name, entries in ((METRICS, run.metrics), (VALIDATION, run.validations)):
            if not entries:
                run.missing.append(f"No lines in {name}: the curves of its figures are left out.")
        if not run.evaluations:
            run.missing.append(f"No evaluated set: `effasr evaluate {path} MANIFEST` makes one.")
        return run

    def manifest(self, name: str) -> str | None:
        by_name: dict[str, str] = {}
        paths = self.config.get("data", {}).get("validation") or ()
        for path in [paths] if isinstance(paths, str) else paths:
            by_name[free_set_name(path, by_name)] = path
        return self.evaluations[name].get("manifest") or by_name.get(name)

    def counted(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each line of metrics with the number of its steps."""
        before = 0
        for line in self.metrics:
            yield line, max(line["step"] - before, 0)
            before = line["step"]


def _lines(path: Path, *required: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(path) if all(name in line for name in required)]


def run_page(path: Path, page: Path) -> str:
    """Return the page; it links audio relative to the file that it will be."""
    run = _Run.read(path)
    sections = {
        "Curves": _curves(run),
        "Sets": _sets(run),
        "Worst utterances": _worst(run, Players(page)),
        "Examples over time": _examples(run),
        "Warnings and data": _events(run),
        "Configuration": _configuration(run),
    }
    sections["Not there"] = "".join(map(paragraph, run.missing))
    return document(path.absolute().name, list(_tiles(run)), sections)


def _rate(line: Mapping[str, Any]) -> tuple[Metric, Any]:
    """Return the metric that is usual for the task and the script of a set."""
    metric = BY_NAME.get(str(line.get("rate")), BY_NAME["wer"])
    return metric, line.get(metric.name)


def _tiles(run: _Run) -> Iterator[tuple[str, str, str]]:
    if run.metrics:
        limit = run.config.get("training", {}).get("max_steps")
        state = "in training, or killed" if (run.path / LOCK).exists() else "not in training"
        yield f"step of {limit or '?'}", f"{run.metrics[-1]['step']:,}", state
    for name, lines in run.validations.items():
        if rated := [line for line in lines if _rate(line)[1] is not None]:
            metric, _ = _rate(rated[-1])
            choose = max if metric.higher_is_better else min
            best = choose(rated, key=lambda line: _rate(line)[1])
            value = metric.text(_rate(best)[1])
            extreme = "highest" if metric.higher_is_better else "lowest"
            yield f"{metric.label} of {name}", value, f"{extreme}, at step {best['step']:,}"
    for name, result in run.evaluations.items():
        metric, value = _rate(result)
        if result.get("model"):
            yield f"{metric.label} of {name}", metric.text(value), "by effasr evaluate"
    seconds = sum(count * (line.get("audio_seconds") or 0) for line, count in run.counted())
    if seconds:
        yield "audio", f"{seconds / 3600:,.1f} h", "trained on, repetitions included"


def _curve(lines: Sequence[Mapping[str, Any]], name: str, factor: float = 1.0) -> list[Any]:
    values = ((line["step"], line.get(name)) for line in lines)
    return [(step, factor * value) for step, value in values if isinstance(value, int | float)]


def _curves(run: _Run) -> str:
    lines = run.metrics
    losses: list[Series] = []
    for name, color in zip(LOSSES, _COLORS, strict=False):
        points = _curve(lines, name)
        # Parts that the model lacks are 0, and a single one is the loss.
        if any(value for _, value in points) and all(points != known for *_, known in losses):
            losses.append((name, color, points))
    by_set = lambda rate, factor: [
        (name, _COLORS[number % len(_COLORS)], _curve(made, rate, factor))
        for number, (name, made) in enumerate(run.validations.items())
    ]
    speeds = [
        (line["step"], line["audio_seconds"] / line["step_s"])
        for line in lines
        if line.get("audio_seconds") and line["step_s"]
    ]
    padding = [
        (name, color, _curve(lines, f"padding_{name}", 100))
        for name, color in zip(("frames", "tokens"), _COLORS, strict=False)
    ]
    return charts(
        line_chart("Loss", losses),
        line_chart("Word error rate of validation", by_set("wer", 100), " %", 0),
        line_chart("Character error rate of validation", by_set("cer", 100), " %", 0),
        line_chart("BLEU of validation", by_set("bleu", 1), "", 0),
        line_chart("chrF of validation", by_set("chrf", 1), "", 0),
        line_chart("Loss of validation", by_set("cross_entropy", 1)),
        line_chart("Learning rate", [("lr", "--blue", _curve(lines, "lr"))], "", 0),
        line_chart("Norm of the gradient", [("norm", "--blue", _curve(lines, "grad_norm"))]),
        line_chart("Seconds of audio a second", [("audio", "--aqua", speeds)], "", 0),
        line_chart("Padding", padding, " %", 0),
    )


def _sets(run: _Run) -> str:
    names = "set", "by", "utterances", "words", "WER %", "95 % interval", "CER %", "failed"
    # Columns of translations, where a set has some.
    scores = [x for x in ("bleu", "chrf") if any(x in row for row in run.evaluations.values())]
    rate = lambda value: None if value is None else Cell(percent(value), value)
    rows = [
        (
            *(name, "effasr evaluate" if result.get("model") else "training"),
            *(result.get("utterances"), result.get("words"), rate(result.get("wer"))),
            " to ".join(map(percent, result.get("wer_interval") or ())),
            *(rate(result.get("cer")), result.get("failed")),
            *(result.get("normalizer"), result.get("rtfx")),
            *(Cell(BY_NAME[each].figure(result.get(each)), result.get(each)) for each in scores),
        )
        for name, result in run.evaluations.items()
    ]
    note = "Intervals are bootstraps over utterances. Of training it is the last validation."
    columns = *names, "normaliser", "RTFx", *(BY_NAME[each].label for each in scores)
    return lead(note) + table(columns, rows, sortable=True) if rows else ""


def _worst(run: _Run, players: Players) -> str:
    parts = []
    for name, result in run.evaluations.items():
        try:
            evaluation = _scored(run.path / "evaluation" / name, str(result["normalizer"]))
        except (OSError, *WRONG_VALUES) as error:
            run.missing.append(f"{name}: no utterances: {error}")
            continue
        worst, cuts, manifest = evaluation.worst(_WORST), {}, run.manifest(name)
        speakers: dict[str, str] = {}
        chosen = {utterance.id for utterance in worst}
        try:
            if manifest is not None and worst:
                for identifier, cut in cuts_of(manifest, {x.id for x in evaluation.utterances}):
                    if cut.supervisions and cut.supervisions[0].speaker:
                        speakers[identifier] = cut.supervisions[0].speaker
                    if identifier in chosen:
                        cuts[identifier] = cut
        except (OSError, ValueError) as error:
            run.missing.append(f"{name}: {error}")
        if len(cuts) < len(worst):
            where = manifest or "its wer.json, which names no manifest: evaluate again"
            run.missing.append(f"{name}: audio of {len(worst) - len(cuts)} utterances, by {where}")
        shown = "".join(_utterance(each, result["normalizer"], cuts, players) for each in worst)
        tables = _by_length(evaluation) + _by_speaker(evaluation, speakers) + _by_word(evaluation)
        parts.append(f"<h3>{escape(name)}</h3>{tables}{shown}")
    return _ALIGNED + NOTE + "".join(parts) if parts else ""


def _scored(folder: Path, normalizer: str) -> Evaluation:
    utterances = []
    for row in read_lines(folder / HYPOTHESES):
        reference, hypothesis = (str(row.get(name) or "") for name in ("reference", "hypothesis"))
        normalize = get_normalizer(normalizer, str(row.get("language") or ""))
        errors = count_errors(normalize(reference), normalize(hypothesis))
        duration = float(row.get("duration") or 0)
        texts = (
            str(row["id"]),
            str(row.get("group") or row.get("language") or ""),
            reference,
            hypothesis,
        )
        utterances.append(ScoredUtterance(*texts, duration, errors))
    return Evaluation(normalizer, tuple(utterances))


def _by_length(evaluation: Evaluation) -> str:
    rates = []
    for low, high in pairwise(_LENGTHS):
        chosen = (each.errors for each in evaluation.transcriptions if low <= each.duration < high)
        if (errors := total(chosen)).words:
            rates.append(f"{low} to {high} s {percent(errors.wer)} % of {errors.words:,} words")
    return paragraph(f"WER by length: {'; '.join(rates)}.") if rates else ""


def _by_speaker(evaluation: Evaluation, speakers: Mapping[str, str]) -> str:
    parts: dict[str, list[ErrorCounts]] = {}
    for each in evaluation.transcriptions:
        if each.id in speakers:
            parts.setdefault(speakers[each.id], []).append(each.errors)
    rows = [
        (
            *(Cell(isolated(speaker)), len(counts), errors.words, errors.errors),
            Cell(percent(errors.wer), errors.wer),
        )
        for speaker, counts in parts.items()
        for errors in [total(counts)]
    ]
    rows.sort(key=lambda row: -row[3])
    names = "speaker", "utterances", "words", "errors", "WER %"
    note = f"Of {len(rows):,} speakers, those with most errors:"
    return paragraph(note) + table(names, rows[:_ROWS], sortable=True) if rows else ""


def _by_word(evaluation: Evaluation) -> str:
    spoken, inserted = Counter[str](), Counter[str]()
    instead: dict[str, Counter[str]] = {}
    for each in evaluation.transcriptions:
        normalize = get_normalizer(evaluation.normalizer, each.language)
        for word, heard in align(normalize(each.reference), normalize(each.hypothesis)).pairs:
            if word is None:
                inserted[str(heard)] += 1
                continue
            spoken[word] += 1
            if heard != word:
                instead.setdefault(word, Counter())[heard or ""] += 1
    wrong = Counter({word: counts.total() for word, counts in instead.items()})
    rows = []
    for word, _ in (wrong + inserted).most_common(_ROWS):
        often = ", ".join(
            f"{isolated(heard) if heard else 'nothing'} {count:,}"
            for heard, count in instead.get(word, Counter()).most_common(3)
        )
        cells = spoken[word], wrong[word], inserted[word], Cell(often or "-")
        rows.append((Cell(isolated(word)), *cells))
    names = "word", "spoken", "wrong", "inserted", "in its place"
    return paragraph("Words with most errors:") + table(names, rows, sortable=True) if rows else ""


def _utterance(
    utterance: ScoredUtterance, normalizer: str, cuts: Mapping[str, Cut], players: Players
) -> str:
    """Return an utterance with both texts as one, in which errors are marked."""
    normalize = get_normalizer(normalizer, utterance.language)
    words = []
    for expected, heard in align(
        normalize(utterance.reference), normalize(utterance.hypothesis)
    ).pairs:
        if expected == heard:
            words.append(isolated(expected))
            continue
        words += [] if expected is None else [f"<del>{isolated(expected)}</del>"]
        words += [] if heard is None else [f"<ins>{isolated(heard)}</ins>"]
    content = f'<p class="pair" dir="auto">{" ".join(words)}</p>'
    if utterance.id in cuts:
        content += players.player(cuts[utterance.id])
    errors = utterance.errors
    return item(utterance.id, f"{errors.errors} errors in {errors.words} words", content)


def _examples(run: _Run) -> str:
    texts: dict[tuple[str, str, str], list[tuple[int, Cell]]] = {}
    for name, lines in run.validations.items():
        for line in lines:
            for example in line.get("examples") or ():
                key = name, str(example.get("id")), str(example.get("reference"))
                cell = Cell(isolated(example.get("hypothesis")))
                texts.setdefault(key, []).append((line["step"], cell))
    return "".join(
        item(f"{name}: {identifier}", "", f'<p class="pair">{isolated(reference)}</p>')
        # The first and the last, and an even sample of those between.
        + table(("step", "transcribed"), [*rows[: -1 : -(-len(rows) // _EXAMPLES)], rows[-1]])
        for (name, identifier, reference), rows in texts.items()
    )


def _events(run: _Run) -> str:
    rows = [
        (
            *(line.get("step"), str(line.get("title"))),
            f"{line.get('cause')} Remedy: {line.get('remedy')}" if line.get("active") else "over",
        )
        for line in read_lines(run.path / WARNINGS)
    ]
    content = table(("step", "warning", "cause and remedy"), rows) if rows else ""
    for file, title in ((DROPPED, "dropped"), (SKIPPED, "skipped"), (UNREADABLE, "unreadable")):
        if lines := read_lines(run.path / file):
            reasons = Counter(str(line.get("reason", "not finite")) for line in lines)
            listed = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
            content += paragraph(f"{len(lines):,} {title} ({listed}), each listed in {file}.")
    return content


def _configuration(run: _Run) -> str:
    code = lambda value: Cell(f"<code>{escape(str(value))}</code>")
    before = dict(_flat(configuration.complete(TrainConfig, {})))
    rows = [
        (code(name), code(value), code(before[name]) if name in before else None)
        for name, value in _flat(run.config)
        if before.get(name) != value
    ]
    note = "Fields that differ from the defaults; config.yaml has all."
    return lead(note) + table(("field", "value", "default"), rows) if rows else ""


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value

"""Compares ways to use audio without text: 10 transcribed minutes of 3 hours of the demo's speech.

    python profiling/studies/audio_without_text.py CORPUS --csv FILE.csv [--seeds 0 1 2]
        [--only SYSTEM ...] [--steps 2000] [--pretrain-steps 6000] [--minutes 10] [--hours 3]
        [--min-confidence 0.8] [--work FOLDER]

CORPUS is a folder that `effasr demo-data` wrote. All systems have the same CTC model, tokenizer and
test set, and as many updates in each stage. A row has the word error rate of a system and a seed,
with a bootstrap interval, and the CPU seconds of its stages, training and labelling, in one thread.
A system that has a row for a seed, the data and as many updates is left out, and stages that are
complete are used again: the command can be interrupted and repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import rows
from bench.provenance import provenance
from small_data import table
from small_data.effasr_runs import QUIET, Commands, once

STUDY = "audio_without_text"
COLUMNS = (
    *("study", "system", "seed", "minutes", "hours", "updates", "cpu_s", "own_cpu_s"),
    *("words", "wer", "wer_low", "wer_high", "cer", "insertions", "deletions", "substitutions"),
    *("labels", "label_hours", "device", "torch", "triton", "git", "date"),
)
"""``cpu_s``: all stages up to this one; ``own_cpu_s``: the last; ``updates``: of all stages."""

ENCODER = ("model.decoder=null", "model.encoder.subsampling=4", "data.validation=[]")
MODEL = (
    *ENCODER,
    *("loss.ctc_weight=1", "loss.ctc_weight_before=null"),
    *("loss.guided_weight=0", "loss.guided_after_ctc=null"),
    "model.spec_augment={freq_masks: 2, freq_width: 14, time_masks: 4}",
    *("model.encoder.residual_dropout=0.1", "data.frame_budget=320", "training.ema_decay=0.999"),
)
BATCH = 2
"""Micro-batches of a step."""
VOCABULARY = 128
LABELLED_SHARE = 0.3
"""Share of the transcripts in an epoch with labels."""


@dataclass(frozen=True)
class Stage:
    """A run that has been trained.

    Attributes:
        run: Folder of the run.
        updates: Updates of this stage and of those that it needed.
        cpu_s: CPU seconds of all these, labelling included.
        own_cpu_s: CPU seconds of the last training.
        labels: Labelled segments that it was trained on.
        label_hours: Their hours.
    """

    run: Path
    updates: int
    cpu_s: float
    own_cpu_s: float
    labels: int = 0
    label_hours: float = 0.0


class Study:
    """Stages of one seed; each is trained once, and used by all systems that need it."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.options, self.seed = options, seed
        self.commands = Commands(options.work, table.show)
        self.data = options.work / "data"
        self.tokenizer = self.data / "tokenizer"

    def prepare(self) -> None:
        """Write the manifests, of transcripts, of audio without text, and of both with texts."""
        corpus = str(self.options.corpus.absolute())
        settings = {"corpus": corpus} | self._settings("minutes", "hours")
        once(self.data / "cpu_s.json", settings, self._prepare)

    def _prepare(self) -> float:
        self.data.mkdir(parents=True, exist_ok=True)
        source = self.options.corpus / "train.jsonl"
        lines = [json.loads(line) for line in source.read_text().splitlines()]
        for line in lines:
            line["audio_filepath"] = str((source.parent / line["audio_filepath"]).absolute())
        random.Random(0).shuffle(lines)
        few = _lasting(lines, 60 * self.options.minutes)
        every = _lasting(lines, 3600 * self.options.hours)
        rest = [{k: v for k, v in line.items() if k != "text"} for line in every[len(few) :]]
        for name, some in (("transcripts", few), ("audio", rest), ("oracle", every)):
            text = "".join(json.dumps(line) + "\n" for line in some)
            (self.data / f"{name}.jsonl").write_text(text)
        manifest = str(self.data / "transcripts.jsonl")
        vocabulary = ("--vocab-size", str(VOCABULARY))
        # Not what an interrupted command had made.
        shutil.rmtree(self.tokenizer, ignore_errors=True)
        return self.commands.call("tokenizer", manifest, str(self.tokenizer), *vocabulary)

    def supervised(self) -> Stage:
        """Train on the transcripts alone."""
        return self._train("supervised", *MODEL, self._on("transcripts"), self._tokens)

    def oracle(self) -> Stage:
        """Train on all texts, those that the others lack included."""
        return self._train("oracle", *MODEL, self._on("oracle"), self._tokens)

    def best_rq(self) -> Stage:
        """Pretrain on all audio, and fine-tune on the transcripts."""
        steps = self.options.pretrain_steps
        pretraining = (*ENCODER, self._on("oracle"), "data.frame_budget=640")
        first = self._train(
            *("pretrained", *pretraining),
            recipe="pretrain_best_rq",
            steps=steps,
            settings=("pretrain_steps",),
        )
        given = (*MODEL, self._on("transcripts"), self._tokens, f"init_from={first.run}")
        return self._train("best_rq", *given, before=first, settings=("pretrain_steps",))

    def noisy_student(self, generation: int) -> Stage:
        """Train on the transcripts and on labels by the generation before."""
        teacher = self.supervised() if generation == 1 else self.noisy_student(generation - 1)
        name = f"noisy_student_{generation}"
        out = self.options.work / "labels" / f"{name}_{self.seed}"
        arguments = (str(teacher.run), str(self.data / "audio.jsonl"), str(out), "--method", "ctc")
        least = ("--min-confidence", str(self.options.min_confidence))

        def label() -> float:
            # Not what an interrupted command had done: its time would be missing.
            shutil.rmtree(out, ignore_errors=True)
            return self.commands.call("label", *arguments, *least)

        settings = self._settings("steps", "min_confidence")
        spent = once(out / "cpu_s.json", settings, label)
        report = json.loads((out / "report.json").read_text())
        kept = report["kept"]
        data = self._mix("labels", out / "manifest.jsonl")
        if not kept["utterances"]:
            # A teacher that says nothing leaves the transcripts; the row has 0 labels.
            data = self._on("transcripts")
        before = replace(teacher, cpu_s=teacher.cpu_s + spent)
        given = (*MODEL, data, self._tokens)
        made = self._train(name, *given, before=before, settings=("min_confidence",))
        return replace(made, labels=kept["utterances"], label_hours=kept["hours"])

    def teacher(self, *, times: int = 1, rule: bool = True) -> Stage:
        """Go on from the supervised model with a teacher in the loop.

        A teacher that began with random weights would label before its CTC is of use, and teach
        its student to say nothing.

        Args:
            times: Factor of the batch; there are as many times fewer updates.
            rule: Whether the decay of the average follows the batch.
        """
        before = self.supervised()
        name = "teacher" if times == 1 else f"teacher_x{times}_{'rule' if rule else 'plain'}"
        steps = max(1, self.options.steps // times)
        given = [*MODEL, self._mix("audio", self.data / "audio.jsonl"), "data.text=optional"]
        given += [f"init_from={before.run}", "data.tokenizer=''", "training.teacher.after_step=0"]
        given += [f"data.micro_batches={times * BATCH}"]
        given += [f"optimizer.lr_reference_micro_batches={BATCH}"]
        given += [f"schedule.warmup_steps={max(1, self._warmup // times)}"]
        if rule:
            given.append(f"training.ema_reference_micro_batches={BATCH}")
        return self._train(name, *given, steps=steps, before=before)

    @property
    def _warmup(self) -> int:
        return max(1, min(200, self.options.steps // 10))

    def _settings(self, *names: str) -> dict[str, object]:
        return {name: getattr(self.options, name) for name in names}

    @property
    def _tokens(self) -> str:
        return f"data.tokenizer={self.tokenizer}"

    def _on(self, name: str) -> str:
        return f"data.train={self.data / name}.jsonl"

    def _mix(self, name: str, manifest: Path) -> str:
        transcripts = self.data / "transcripts.jsonl"
        few = f"transcripts: {{manifests: {transcripts}, weight: {LABELLED_SHARE}}}"
        return f"data.mix={{sources: {{{few}, {name}: {manifest}}}}}"

    def _train(
        self,
        name: str,
        *given: str,
        recipe: str = "demo",
        steps: int | None = None,
        before: Stage | None = None,
        settings: Sequence[str] = (),
    ) -> Stage:
        """Train a stage, unless it has been trained.

        Args:
            name: Name of the stage.
            given: Overrides of the recipe.
            recipe: Recipe of `effasr train`.
            steps: Updates of this stage; None for those of the option.
            before: Stage that this one needs.
            settings: Options besides ``steps`` that the stage depends on.
        """
        updates: int = steps or self.options.steps
        output, run = self.options.work / "runs", f"{name}_{self.seed}"
        base = [f"name={run}", f"output={output}", f"seed={self.seed}", *QUIET]
        base += [f"training.max_steps={updates}", f"training.checkpoint_every={10**9}"]
        base += [f"schedule.warmup_steps={self._warmup}", "training.profile=null"]
        if not any(one.startswith("data.train=") for one in given):
            base.append("data.train=[]")

        def train() -> float:
            return self.commands.call("train", recipe, *base, *given)

        spent = once(output / run / "cpu_s.json", self._settings("steps", *settings), train)
        earlier = Stage(Path(), 0, 0.0, 0.0) if before is None else before
        return Stage(output / run, earlier.updates + updates, earlier.cpu_s + spent, spent)


SYSTEMS: dict[str, Callable[[Study], Stage]] = {
    "supervised": Study.supervised,
    "best_rq": Study.best_rq,
    "noisy_student_1": lambda study: study.noisy_student(1),
    "noisy_student_2": lambda study: study.noisy_student(2),
    "teacher": Study.teacher,
    "teacher_x4_rule": lambda study: study.teacher(times=4),
    "teacher_x4_plain": lambda study: study.teacher(times=4, rule=False),
    "oracle": Study.oracle,
}


def updates(system: str, options: argparse.Namespace) -> int:
    """Return the updates of all stages of a system, before they are trained."""
    steps: int = options.steps
    match system:
        case "best_rq":
            return options.pretrain_steps + steps
        case "noisy_student_1" | "teacher":
            return 2 * steps
        case "noisy_student_2":
            return 3 * steps
        case "teacher_x4_rule" | "teacher_x4_plain":
            return steps + max(1, steps // 4)
    return steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and evaluate the systems that have no row yet."""
    options = _parser().parse_args(arguments)
    unknown = sorted(set(options.only) - SYSTEMS.keys())
    if unknown:
        raise ValueError(f"`--only` must name systems of {', '.join(SYSTEMS)}, but has {unknown}.")
    for seed in options.seeds:
        study = Study(options, seed)
        study.prepare()
        for name in options.only or SYSTEMS:
            wanted = {"minutes": options.minutes, "hours": options.hours}
            wanted["updates"] = updates(name, options)
            if table.is_done(options.csv, system=name, seed=seed, **wanted):
                told = f"{name}, seed {seed}, {wanted['updates']} updates"
                table.show(f"{told}: skipped, as {options.csv} has its row")
            else:
                _append(options, name, seed, SYSTEMS[name](study), study.commands)
    return 0


def _append(
    options: argparse.Namespace, name: str, seed: int, stage: Stage, commands: Commands
) -> None:
    """Evaluate a system and write its row."""
    out = stage.run / "evaluation_test"
    manifest = str(options.corpus / "test.jsonl")
    asked = ("--run", str(stage.run), "--manifest", manifest, "--output", str(out))
    commands.call("evaluate", *asked, "--worst", "0")
    result = json.loads((out / "wer.json").read_text())
    low, high = result["wer_interval"]
    row: dict[str, Any] = {
        "study": STUDY,
        "system": name,
        "seed": seed,
        "minutes": options.minutes,
        "hours": options.hours,
        "updates": stage.updates,
        "cpu_s": round(stage.cpu_s, 1),
        "own_cpu_s": round(stage.own_cpu_s, 1),
        "wer_low": round(low, 4),
        "wer_high": round(high, 4),
        "labels": stage.labels,
        "label_hours": stage.label_hours,
    }
    for column in ("words", "insertions", "deletions", "substitutions"):
        row[column] = result[column]
    row |= {column: round(result[column], 4) for column in ("wer", "cer")}
    import torch

    found = provenance(torch.device("cpu"))
    row |= {key: found[key] for key in COLUMNS if key in found}
    rows.append(options.csv, COLUMNS, row)
    table.show(f"{name}, seed {seed}: WER {result['wer']:.3f}, {stage.cpu_s:.0f} CPU s")


def _lasting(lines: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return the first lines that last so long."""
    chosen, total = [], 0.0
    for line in lines:
        if total >= seconds:
            break
        chosen.append(line)
        total += line["duration"]
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, metavar="CORPUS")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[], metavar="SYSTEM")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pretrain-steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--min-confidence", type=float, default=0.8)
    parser.add_argument("--work", type=Path, default=Path("runs/audio_without_text"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

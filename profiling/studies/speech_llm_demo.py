"""Compares ways to teach the demo's language model to listen: WER by instruction, and forgetting.

    effasr demo-data CORPUS --multilingual --conversations
    effasr train demo_multilingual data.train=CORPUS/train.jsonl ...
    python profiling/studies/speech_llm_demo.py CORPUS --encoder RUN
        [--csv profiling/results/speech_llm.csv] [--seeds 0 1 2] [--only SYSTEM ...]
        [--text-steps 600] [--steps 6000] [--work FOLDER]

``text`` is the Llama of `speech_llm_demo_text`, trained on written conversations alone. The others
put it behind the encoder of RUN, with as many updates of as many frames: ``joint`` on spoken and
written conversations in one stage (`speech_llm_demo`), ``speech_only`` on the spoken ones. A row
has the word error rate of a system for one instruction of CORPUS/speech_dev.jsonl (transcribe,
translate), with a bootstrap interval, and the perplexity of the answers in CORPUS/text_dev.jsonl,
by token, with the end of each answer. A system that has rows for a seed and as many updates is left
out, and what is trained is used again: the command can be interrupted and repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import rows
from bench.provenance import provenance
from small_data import table
from small_data.effasr_runs import QUIET, Commands, once

if TYPE_CHECKING:
    from effasr.checkpoint import LoadedModel

STUDY = "speech_llm_demo"
COLUMNS = (
    *("study", "system", "seed", "updates", "cpu_s", "instruction", "utterances", "words"),
    *("wer", "wer_low", "wer_high", "cer", "text_perplexity"),
    *("device", "torch", "triton", "git", "date"),
)
"""``cpu_s``: of the training, without that of the encoder and of ``text``."""

DATA = {
    "joint": "data.mix={{sources: {{speech: {{manifests: {speech}, weight: 0.8}}, "
    "text: {{manifests: {text}, weight: 0.2}}}}}}",
    "speech_only": "data.mix=null",
}
"""What the systems are trained on."""
SYSTEMS = ("text", *DATA)
_TOGETHER = 32
"""Written conversations of a batch."""


class Study:
    """The systems of one seed; each is trained once."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.options, self.seed = options, seed
        self.commands = Commands(options.work, table.show)

    def run(self, system: str) -> None:
        """Train a system, and write its rows."""
        trained, spent = self._text() if system == "text" else self._joined(system)
        import torch

        from effasr.checkpoint import load_model, resolve

        cpu = torch.device("cpu")
        loaded = load_model(resolve(trained), cpu)
        row = {
            "study": STUDY,
            "system": system,
            "seed": self.seed,
            "updates": updates(system, self.options),
            "cpu_s": round(spent, 1),
            "text_perplexity": round(
                text_perplexity(loaded, self.options.corpus / "text_dev.jsonl"), 3
            ),
        }
        found = provenance(cpu)
        row |= {key: found[key] for key in COLUMNS if key in found}
        results = [row] if system == "text" else [row | one for one in self._errors(trained)]
        # All at once, so that a system with a row has every row.
        for one in results:
            rows.append(self.options.csv, COLUMNS, one)
            table.show(" ".join(f"{key}={one[key]}" for key in COLUMNS[1:-5] if key in one))

    def _text(self) -> tuple[Path, float]:
        """Train the language model on written conversations, and export it."""
        corpus = self.options.corpus
        given = [f"data.train={corpus / 'text.jsonl'}"]
        given.append(f"model.language_model.path={corpus / 'chat_model'}")
        return self._train("text", "speech_llm_demo_text", given)

    def _joined(self, system: str) -> tuple[Path, float]:
        """Put the language model behind the encoder, and train both."""
        text, _ = self._text()
        folder = self.options.work / f"language_model_{self.seed}"
        if not (folder / "config.json").is_file():
            self.commands.call("export", str(text), str(folder))
        corpus = self.options.corpus
        speech, written = corpus / "speech.jsonl", corpus / "text.jsonl"
        given = [DATA[system].format(speech=speech, text=written)]
        if system == "speech_only":
            given.append(f"data.train={speech}")
        given += [f"init_from={self.options.encoder}", "data.validation=[]"]
        given.append(f"model.language_model.path={folder}")
        return self._train(system, "speech_llm_demo", given)

    def _train(self, system: str, recipe: str, given: Sequence[str]) -> tuple[Path, float]:
        """Train a system, unless it has been trained; return its run and CPU seconds."""
        options = self.options
        output, name = options.work / "runs", f"{system}_{self.seed}"
        steps = updates(system, options)
        settings = {"corpus": str(options.corpus), "text_steps": options.text_steps}
        if system != "text":
            settings |= {"encoder": str(options.encoder.absolute()), "steps": options.steps}

        def train() -> float:
            base = [f"name={name}", f"output={output}", f"seed={self.seed}", *QUIET]
            base += [f"training.max_steps={steps}", f"training.checkpoint_every={10**9}"]
            base.append(f"schedule.warmup_steps={max(1, min(100, steps // 10))}")
            return self.commands.call("train", recipe, *base, *given)

        return output / name, once(output / name / "cpu_s.json", settings, train)

    def _errors(self, run: Path) -> Iterator[dict[str, Any]]:
        """Yield the columns of each instruction."""
        data = self.options.work / "data"
        for number, (instruction, lines) in enumerate(
            by_instruction(self.options.corpus / "speech_dev.jsonl")
        ):
            data.mkdir(parents=True, exist_ok=True)
            manifest, out = data / f"instruction_{number}.jsonl", run / f"evaluation_{number}"
            manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
            asked = ("--run", str(run), "--manifest", str(manifest), "--output", str(out))
            self.commands.call("evaluate", *asked, "--instruction", instruction, "--worst", "0")
            result = json.loads((out / "wer.json").read_text())
            low, high = result["wer_interval"]
            rates = {"wer": result["wer"], "wer_low": low, "wer_high": high, "cer": result["cer"]}
            yield {
                "instruction": instruction,
                "utterances": len(lines),
                "words": result["words"],
                **{name: round(rate, 4) for name, rate in rates.items()},
            }


def updates(system: str, options: argparse.Namespace) -> int:
    """Return the updates of a system."""
    return options.text_steps if system == "text" else options.steps


def by_instruction(path: Path) -> list[tuple[str, list[dict[str, str]]]]:
    """Return each instruction of a manifest of conversations, and its utterances.

    Args:
        path: Conversations of one recording, an instruction and an answer.

    Raises:
        ValueError: A conversation has other turns.
    """
    from effasr.data.conversation.messages import AudioPart, conversations

    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    for one in conversations(path):
        parts = [message.parts for message in one.messages]
        match parts:
            case [(AudioPart() as audio, str(instruction)), (str(answer),)]:
                line = {"id": one.id, "audio_filepath": str(audio.path), "text": answer}
                found[instruction].append(line)
            case _:
                raise ValueError(
                    f"{one.origin}: a conversation must have a recording, an instruction and an "
                    f"answer, but {one.problem or 'has other turns'}."
                )
    return sorted(found.items())


def text_perplexity(loaded: LoadedModel, path: Path) -> float:
    """Return the perplexity of the answers in written conversations, by token.

    Raises:
        ValueError: A conversation cannot be used, or has speech.
    """
    import torch

    from effasr.data.conversation.collate import ConversationExample, collate_conversations
    from effasr.data.conversation.messages import conversations
    from effasr.data.conversation.tokenize import conversation_rows
    from effasr.data.tokenizer import ChatTokenizer

    model, tokenizer = loaded.model, loaded.tokenizer
    settings = model.config.language_model
    assert settings is not None
    assert isinstance(tokenizer, ChatTokenizer)

    examples = []
    for one in conversations(path):
        if one.problem is not None or one.clips:
            reason = one.problem or "has speech"
            raise ValueError(f"{one.origin}: a conversation must be written, but {reason}.")
        examples.append(ConversationExample(one.id, conversation_rows(one.messages, tokenizer)))
    nats = tokens = 0.0
    with torch.no_grad():
        for begin in range(0, len(examples), _TOGETHER):
            some = examples[begin : begin + _TOGETHER]
            batch = collate_conversations(some, stack=settings.stack, pad_id=tokenizer.pad_id)
            nats += float(model.eval()(batch).cross_entropy)
            tokens += batch.num_targets
    return math.exp(nats / max(1.0, tokens))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and evaluate the systems that have no row yet."""
    options = _parser().parse_args(arguments)
    if unknown := sorted(set(options.only) - set(SYSTEMS)):
        raise ValueError(f"`--only` must name systems of {', '.join(SYSTEMS)}, but has {unknown}.")
    options.corpus = options.corpus.absolute()
    for seed in options.seeds:
        study = Study(options, seed)
        for system in options.only or SYSTEMS:
            number = updates(system, options)
            if table.is_done(options.csv, system=system, seed=seed, updates=number):
                told = f"{system}, seed {seed}, {number} updates"
                table.show(f"{told}: skipped, as {options.csv} has its rows")
            else:
                study.run(system)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, metavar="CORPUS")
    parser.add_argument("--encoder", type=Path, required=True, metavar="RUN")
    results = Path(__file__).parents[1] / "results"
    parser.add_argument("--csv", type=Path, default=results / "speech_llm.csv")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[], metavar="SYSTEM")
    parser.add_argument("--text-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--work", type=Path, default=Path("runs/speech_llm_study"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

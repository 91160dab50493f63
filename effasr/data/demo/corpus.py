"""Builds the demo corpus on disk, once: a second call with the same arguments finds it."""

import hashlib
import importlib.util
import json
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from effasr.data.atomic_files import naming_errors, write_atomically
from effasr.data.demo.acoustics import SAMPLE_RATE
from effasr.data.demo.plan import SPLITS, Recording, plan
from effasr.data.demo.render import Progress, render_all
from effasr.data.locks import writing_alone

_STATE = "demo-corpus.json"
# Part of the fingerprint: raise it when equal plans give other audio or manifests.
_VERSION = 1


@dataclass(frozen=True, slots=True)
class SplitStatistics:
    """Contents of a split. Rows are manifest lines; a translated recording has two."""

    rows: int
    recordings: int
    voices: int
    words: int
    hours: float
    median_s: float
    shortest_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class DemoCorpus:
    """Paths of a built corpus."""

    root: Path  # Folder of the corpus
    train: Path  # Manifest of the training split, NeMo JSONL
    dev: Path  # Manifest of the development split: other sentences, other voices
    test: Path  # Manifest of the test split: again other sentences, other voices
    sample: Path  # A test recording to try a trained model on
    statistics: Mapping[str, SplitStatistics]  # Split -> figures


def build(
    out: Path | str,
    *,
    multilingual: bool = False,
    utterances: int = 4000,
    seed: int = 0,
    jobs: int = 2,
    progress: Progress | None = None,
) -> DemoCorpus:
    """Synthesise the corpus into ``out`` unless it is there already.

    Half digit strings, half commands; other voices and other sentences in every split. The bytes
    depend on ``multilingual``, ``utterances``, ``seed`` and the installed synthesiser alone.
    """
    for name, value, least in (("utterances", utterances, 8), ("jobs", jobs, 1)):
        if value < least:
            raise ValueError(f"demo corpus: `{name}` must be at least {least}, but is {value}")
    root = Path(out)
    recordings = plan(multilingual=multilingual, utterances=utterances, seed=seed)
    planned = json.dumps([_VERSION, SAMPLE_RATE, [asdict(item) for item in recordings]])
    fingerprint = hashlib.sha256(planned.encode()).hexdigest()
    state = _read_state(root)
    if state.get("fingerprint") == fingerprint and _is_whole(root, state):
        return _corpus(root, state)
    if importlib.util.find_spec("espeakng_loader") is None:
        raise ValueError(
            "demo corpus: the package espeakng-loader must be installed to synthesise speech, "
            "but is not; run `pip install effasr[demo]`"
        )
    root.mkdir(parents=True, exist_ok=True)
    with writing_alone(root), naming_errors(root):
        # Remove the files of an earlier build, and nothing else.
        for split in SPLITS:
            (root / f"{split}.jsonl").unlink(missing_ok=True)
            if (root / split).exists():
                shutil.rmtree(root / split)
            (root / split / "audio").mkdir(parents=True)
        _write_json(root / _STATE, {"fingerprint": fingerprint, "complete": False})
        lengths = render_all(root, recordings, jobs, progress)
        state = {"fingerprint": fingerprint, "complete": True}
        state |= _write_manifests(root, recordings, lengths)
        _write_json(root / _STATE, state)
    return _corpus(root, state)


def manifest_rows(recording: Recording, duration: float) -> list[dict[str, str | float | bool]]:
    """Return the NeMo JSONL rows of a recording: its transcription, then any translation."""
    rows: list[dict[str, str | float | bool]] = []
    for target, text in recording.texts.items():
        task = "transcribe" if target == recording.language else "translate"
        rows.append(
            {
                "id": f"{Path(recording.path).stem}-{task}",
                "audio_filepath": recording.path,
                "duration": duration,
                "text": text,
                "lang": recording.language,
                "target_lang": target,
                "task": task,
                "pnc": False,
                "speaker": recording.voice,
            }
        )
    return rows


def _read_state(root: Path) -> dict:
    """Return the state file; empty for a new or empty folder."""
    try:
        return json.loads((root / _STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except json.JSONDecodeError:
        return {}
    if root.exists() and any(root.iterdir()):
        raise ValueError(
            f"demo corpus: `out` must be a new or empty folder or an earlier demo corpus, "
            f"but {root} holds other files; name another folder"
        )
    return {}


def _is_whole(root: Path, state: dict) -> bool:
    """Return whether the build ended and nothing was removed since."""
    if not state.get("complete"):
        return False
    return all(
        (root / f"{split}.jsonl").is_file()
        and (root / split / "audio").is_dir()
        and len(os.listdir(root / split / "audio")) == state["statistics"][split]["recordings"]
        for split in SPLITS
    )


def _write_json(path: Path, content: dict) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode())


def _write_manifests(
    root: Path, recordings: Sequence[Recording], lengths: Mapping[str, int]
) -> dict:
    """Write the three manifests and return their entries for the state file."""
    state: dict = {"statistics": {}}
    for split in SPLITS:
        members = [item for item in recordings if item.split == split]
        durations = [lengths[item.path] / SAMPLE_RATE for item in members]
        rows = [
            row
            for item, duration in zip(members, durations, strict=True)
            for row in manifest_rows(item, duration)
        ]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(root / f"{split}.jsonl", lines.encode())
        figures = SplitStatistics(
            rows=len(rows),
            recordings=len(members),
            voices=len({item.voice for item in members}),
            words=len({word for row in rows for word in str(row["text"]).split()}),
            hours=round(sum(durations) / 3600, 3),
            median_s=round(statistics.median(durations), 2),
            shortest_s=round(min(durations), 2),
            longest_s=round(max(durations), 2),
        )
        state["statistics"][split] = asdict(figures)
        if split == "test":
            state["sample"] = members[0].path
    return state


def _corpus(root: Path, state: dict) -> DemoCorpus:
    return DemoCorpus(
        root=root,
        train=root / "train.jsonl",
        dev=root / "dev.jsonl",
        test=root / "test.jsonl",
        sample=root / state["sample"],
        statistics={
            split: SplitStatistics(**figures) for split, figures in state["statistics"].items()
        },
    )

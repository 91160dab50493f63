"""Tables of training on little speech, and of experts."""

from __future__ import annotations

from collections.abc import Sequence

from tables.format import Row, markdown, read, tenths

_CORPORA = {"en": "English, 1.2 h", "nl": "Dutch, 0.6 h", "en+nl": "both"}
_ERRORS = ("WER % (joint search)", "WER % (CTC)", "CER % (joint search)", "CER % (CTC)")


def small_data() -> str:
    """Errors of effasr and SpeechBrain after the same CPU time."""
    lines = []
    for pair in _searches("same CPU time, 800 s"):
        row = pair[0]
        toolkit = "effasr, `small`" if row["toolkit"] == "effasr" else "SpeechBrain 1.1.2"
        heard = f"{float(row['audio_s']) / 3600:.1f}"
        lines.append([_CORPORA[row["corpus"]], toolkit, *_work(row), heard, *_errors(pair)])
    titles = ["corpus", "toolkit", "core s", "steps", "audio heard, h", *_ERRORS]
    return markdown(titles, lines, texts=2)


def subsampling() -> str:
    """Errors of the recipe `small` by subsampling and vocabulary."""
    lines = []
    for _, ctc in _searches("ladder"):
        factor = "8x" if "8x" in ctc["configuration"] else "4x"
        step = float(ctc["cpu_s"]) / int(ctc["steps"])
        errors = tenths(ctc["wer"]), tenths(ctc["cer"])
        lines.append(
            [f"{factor}, {ctc['vocabulary']}", f"{step:.3f}", f"{int(ctc['steps']):,}", *errors]
        )
    return markdown(
        ["subsampling, pieces", "core s a step", "steps", "WER % (CTC)", "CER % (CTC)"], lines
    )


def other_language() -> str:
    """Errors in Dutch, from scratch and from a model of English."""
    found = [pair for pair in _searches("fine-tuning") if pair[0]["corpus"].startswith("nl-")]
    lines = []
    for pair in sorted(
        found, key=lambda pair: (pair[0]["corpus"], _is_tuned(pair), _work(pair[0]))
    ):
        row = pair[0]
        minutes = row["corpus"].removeprefix("nl-").removesuffix("min")
        way = "fine-tuned" if _is_tuned(pair) else "from scratch"
        lines.append([f"{minutes} minutes", way, *_work(row), *_errors(pair)])
    return markdown(["Dutch", "way", "core s", "steps", *_ERRORS], lines, texts=2)


def experts() -> str:
    """Errors of three seeds by number of updates and kind of network."""
    systems = {
        "dense": "dense",
        "named": "experts by name of the source",
        "learned": "experts by a router",
    }
    found: dict[int, dict[str, list[Row]]] = {}
    for row in sorted(read("experts"), key=lambda row: int(row["seed"])):
        by_system = found.setdefault(int(row["updates"]), {})
        by_system.setdefault(row["system"], []).append(row)
    lines = [
        [str(updates), *(", ".join(tenths(row["error"]) for row in rows[one]) for one in systems)]
        for updates, rows in sorted(found.items())
    ]
    return markdown(["updates", *(f"{name}, errors %" for name in systems.values())], lines)


def _searches(study: str) -> list[tuple[Row, Row]]:
    """Return the rows of a study in pairs, of the joint search and of CTC."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in read("small_data"):
        if row["study"] == study:
            names = ("toolkit", "configuration", "corpus", "vocabulary", "cpu_s")
            found.setdefault(tuple(row[name] for name in names), {})[row["decoding"]] = row
    return [(one["joint"], one["ctc"]) for one in found.values() if len(one) == 2]


def _is_tuned(pair: Sequence[Row]) -> bool:
    return pair[0]["configuration"].startswith("fine-tuned")


def _work(row: Row) -> tuple[str, str]:
    return f"{float(row['cpu_s']):.0f}", f"{int(row['steps']):,}"


def _errors(pair: Sequence[Row]) -> list[str]:
    return [tenths(row[measure]) for measure in ("wer", "cer") for row in pair]

"""Writes the tables of README.md and pages of docs/ from profiling/results/*.csv.

    python docs/generate_tables.py [--check]

Each table stands between the lines ``<!-- table: NAME -->`` and ``<!-- end -->``; text around it is
kept. --check writes nothing, and exits with 1 if a page is not up to date.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_DOCS = Path(__file__).parent
sys.path[:0] = [str(_DOCS), str(_DOCS.parent), str(_DOCS.parent / "profiling/studies")]

from tables.format import ROOT, Row, markdown, percent, read  # noqa: E402 (found on the path above)
from tables.small_data import experts, other_language, small_data, subsampling  # noqa: E402

PAGES = (
    *("README.md", "docs/audio-without-text.md", "docs/benchmarks.md", "docs/kernels.md"),
    *("docs/architecture.md", "docs/finetuning.md"),
    *("docs/speech-language-models.md", "docs/transcription.md"),
)
_TABLE = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.S)
_SYSTEMS = ("packed_static", "packed", "sync_bucketed_2d", "random", "transformers")
_NAMES = {
    "librispeech_dev-clean+librispeech_test-clean": "LibriSpeech dev+test-clean",
    "librispeech_train-clean-100_ge3s": "LibriSpeech train-clean-100, 3 s and longer",
    "earnings22_sentences": "Earnings-22, sentences",
    "ami_only_words_segments": "AMI, segments",
}


def training_rows() -> list[Row]:
    """Return the rows of training on a CPU."""
    keys = ("device", "system", "model", "precision", "threads", "frame_budget", "mode")
    return [row for row in read("training", *keys) if row["device"].startswith("cpu")]


def training_summary() -> str:
    """Throughput of the small model by frame budget, for the README."""
    found = {
        (row["frame_budget"], row["system"]): float(row["audio_s_per_s"])
        for row in training_rows()
        if (row["model"], row["precision"], row["threads"], row["mode"])
        == ("small", "float32", "1", "eager")
    }
    titles = [
        *("frame budget", "effasr (packed)", "2D buckets, padded", "random batches, padded"),
        "transformers, random batches",
    ]
    lines = []
    for budget in sorted({budget for budget, _ in found}, key=int):
        rates = [
            found[budget, name]
            for name in ("packed_static", "sync_bucketed_2d", "random", "transformers")
        ]
        audio = int(budget) * 0.08
        lines.append([f"{int(budget):,} ({audio:.0f} s)", *(f"{rate:.0f}" for rate in rates)])
    return markdown(titles, lines)


def training() -> str:
    """Throughput, step time and padding of every system."""
    titles = ["model", "frame budget", "system", "audio s / s", "step, s", "audio s / step"]
    titles += ["padding: frames %", "tokens %", "useful TFLOP/s"]
    titles += ["precision, threads, mode", "revision"]
    order = {name: n for n, name in enumerate(_SYSTEMS)}
    models = list(dict.fromkeys(row["model"] for row in training_rows()))

    def key(row: Row) -> tuple[int, int, int]:
        return models.index(row["model"]), int(row["frame_budget"]), order[row["system"]]

    lines = [
        [
            *(row["model"], f"{int(row['frame_budget']):,}", row["system"]),
            f"{float(row['audio_s_per_s']):.0f}" if float(row["audio_s_per_s"]) > 50
            else f"{float(row['audio_s_per_s']):.1f}",
            f"{float(row['step_s']):.3f} ({float(row['p20_s']):.3f} to {float(row['p80_s']):.3f})",
            f"{float(row['audio_s']):.0f}",
            *(percent(row[f"padding_{kind}"]) for kind in ("frames", "tokens")),
            row["tflops_useful"],
            f"{row['precision']}, {row['threads']}, {row['mode']}",
            f"{row['git'][:7]}, {row['date'][:10]}",
        ]
        for row in sorted(training_rows(), key=key)
    ]  # fmt: skip
    return markdown(titles, lines, texts=3)


def padding() -> str:
    """Padding by corpus, frame budget and strategy."""
    titles = ["lengths", "frame budget", "strategy", "frames %", "tokens %", "FLOPs %", "T x U %"]
    titles += ["imbalance p99 %", "utterances a batch"]
    kinds = ("frames", "tokens", "flops", "cells")
    lines = [
        [
            *(_NAMES.get(row["lengths"], row["lengths"]), f"{int(row['frame_budget']):,}"),
            row["strategy"],
            *(percent(row[f"padding_{kind}"]) for kind in kinds),
            percent(row["rank_imbalance_p99"]),
            f"{float(row['batch_utterances']):.0f}",
        ]
        for row in read("padding")
    ]
    return markdown(titles, lines, texts=3)


def streaming() -> str:
    """Word errors and delay of a model by its latency."""
    titles = ["latency", "chunk, s", "word errors", "algorithmic delay, s: median, 99 %"]
    titles += ["further delay, ms: median, 99 %", "RTFx", "streams"]
    lines = [
        [
            "whole recording" if row["context"] == "full" else f"context {row['context']}",
            row["chunk_s"] or "-",
            f"{100 * float(row['wer']):.2f} %",
            f"{float(row['algorithmic_p50_s']):.2f}, {float(row['algorithmic_p99_s']):.2f}",
            f"{1000 * float(row['delay_p50_s']):.0f}, {1000 * float(row['delay_p99_s']):.0f}",
            f"{float(row['rtfx']):.0f}",
            row["streams"],
        ]
        for row in read("streaming", "model", "method", "beam", "context", "streams", "device")
        if row["wer"] and row["beam"] == "1"
    ]
    return markdown(titles, lines)


_WITHOUT_TEXT = {
    "supervised": "transcripts alone",
    "noisy_student_1": "noisy student, first generation",
    "noisy_student_2": "noisy student, second generation",
    "teacher": "a teacher in the loop, from the model of the transcripts",
    "teacher_x4_rule": "the same with four times the batch, and the average's rule",
    "teacher_x4_plain": "the same with four times the batch, without the rule",
    "best_rq": "BEST-RQ, then the transcripts",
    "oracle": "all 3 hours transcribed",
}


def audio_without_text() -> str:
    """Word errors of ways to use audio without text: the mean and the extremes over seeds."""
    titles = ["system", "updates", "core s", "seeds", "word errors: mean, least and most"]
    found = read("audio_without_text", "system", "seed")
    lines = []
    for system, name in _WITHOUT_TEXT.items():
        own = [row for row in found if row["system"] == system]
        errors = [100 * float(row["wer"]) for row in own]
        range_ = f" ({min(errors):.1f} to {max(errors):.1f})" if len(own) > 1 else ""
        lines.append(
            [
                name,
                f"{int(own[0]['updates']):,}",
                f"{statistics.mean(float(row['cpu_s']) for row in own):.0f}",
                str(len(own)),
                f"{statistics.mean(errors):.1f} %{range_}",
            ]
        )
    return markdown(titles, lines)


_TEXTS = {
    "best": "the search as it is",
    "oracle": "the best of its 16 texts",
    "tuned": "tuned shares of CTC and lengths",
    "fusion": "n-grams over tokens in the search",
    "word_fusion": "n-grams over words in the search",
    "second_pass": "a second pass by n-grams over words",
    "corrector": "a corrector",
}


def second_pass() -> str:
    """Word errors of ways to use texts: the mean and the extremes over seeds."""
    titles = ["word errors, %", "attention decoder", "CTC"]
    found = read("second_pass", "run", "method", "system")
    lines = []
    for system, name in _TEXTS.items():
        cells = [name]
        for method in ("attention", "ctc"):
            errors = [
                100 * float(row["wer"])
                for row in found
                if (row["method"], row["system"]) == (method, system)
            ]
            range_ = f"{min(errors):.2f} to {max(errors):.2f}" if errors else ""
            cells.append(f"{statistics.mean(errors):.2f} ({range_})" if errors else "-")
        lines.append(cells)
    return markdown(titles, lines)


def speech_llm() -> str:
    """What systems of the speech language model's study reach: means and extremes over seeds."""
    titles = ["trained on", "updates", "core s", "transcribing, WER %", "translating, WER %"]
    titles.append("perplexity of written answers")
    found = read("speech_llm", "system", "seed", "updates", "instruction")
    names = {"text": "text", "joint": "speech and text", "speech_only": "speech alone"}
    lines = []
    for system, updates in sorted(
        {(row["system"], int(row["updates"])) for row in found},
        key=lambda key: (list(names).index(key[0]), key[1]),
    ):
        own = [r for r in found if (r["system"], int(r["updates"])) == (system, updates)]
        begin = ("Transcribe", "Translate")
        errors = [
            [100 * float(row["wer"]) for row in own if row["instruction"].startswith(asked)]
            for asked in begin
        ]
        by_seed = {row["seed"]: row for row in own}.values()
        spent = statistics.mean(float(row["cpu_s"]) for row in by_seed)
        cells = [_over_seeds(some, 1) for some in errors]
        cells.append(_over_seeds([float(row["text_perplexity"]) for row in by_seed], 2))
        lines.append([names[system], f"{updates:,}", f"{spent:.0f}", *cells])
    return markdown(titles, lines)


def _over_seeds(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    low, high, mean = min(values), max(values), statistics.mean(values)
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def ladder() -> str:
    """Padding and measured time by strategy."""
    titles = ["strategy", "padding: frames / tokens / FLOPs %"]
    titles += ["mean batch: utterances / audio s", "imbalance p99 %", "TFLOP / audio h"]
    titles += ["CPU s / audio h"]
    lines = [
        [
            row["strategy"],
            " / ".join(percent(row[f"padding_{kind}"]) for kind in ("frames", "tokens", "flops")),
            f"{float(row['batch_utterances']):.0f} / {float(row['batch_audio_seconds']):.0f}",
            percent(row["rank_imbalance_p99"]),
            f"{float(row['flops_per_audio_hour']) / 1e12:.1f}",
            f"{float(row['cpu_seconds_per_audio_hour']):.1f}",
        ]
        for row in read("ladder")
    ]
    return markdown(titles, lines)


def whisper() -> str:
    """Training and transcription with Whisper."""
    titles = ["task", "system", "silence up to", "audio s / s", "time, s", "peak GB"]
    titles += ["frames computed", "revision"]
    keys = ("task", "system", "model", "minimum_s", "batch", "lengths", "device")
    lines = [
        [
            *(row["task"], row["system"], f"{row['minimum_s']} s"),
            f"{float(row['audio_s_per_s']):.1f}",
            f"{float(row['step_s']):.2f} ({float(row['p20_s']):.2f} to {float(row['p80_s']):.2f})",
            f"{float(row['peak_bytes']) / 1e9:.1f}" if row["peak_bytes"] else "",
            f"{float(row['frames']):,.0f}" if row["frames"] else "",
            f"{row['git'][:7]}, {row['date'][:10]}",
        ]
        for row in read("whisper", *keys)
    ]
    return markdown(titles, lines, texts=3)


def decoder_depth() -> str:
    """Word error rate of each seed, and mean RTFx, by depth and search."""
    searches = ("greedy", "--beam 4 --ctc-weight 0.3")
    titles = ["encoder / decoder layers"]
    for search in searches:
        titles += [f"{search if search == 'greedy' else f'`{search}`'}, WER %", "RTFx"]
    found: dict[str, dict[str, list[Row]]] = {}
    for row in read("decoder_depth"):
        depth = f"{row['encoder_layers']} / {row['decoder_layers']}"
        found.setdefault(depth, {}).setdefault(row["search"], []).append(row)
    lines = []
    for depth, by_search in found.items():
        line = [depth]
        for search in searches:
            group = by_search[search]
            line.append(", ".join(row["wer"] for row in group))
            line.append(f"{statistics.mean(float(row['rtfx']) for row in group):.0f}")
        lines.append(line)
    return markdown(titles, lines)


def inference() -> str:
    """RTFx by depth and batch, against transformers."""
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in read("inference", "system", "shape", "size", "batch", "dtype", "device"):
        key = (row["shape"], row["batch"], row["dtype"])
        found.setdefault(key, {})[row["system"]] = row
    lines = []
    for (shape, batch, dtype), rows in sorted(found.items(), key=lambda one: int(one[0][1])):
        rates = [float(rows[name]["rtfx"]) for name in ("effasr", "transformers")]
        lines.append(
            [
                *(shape, batch, dtype, *(f"{rate:.0f}" for rate in rates)),
                *(f"{rates[0] / rates[1]:.2f}", rows["effasr"]["git"][:7]),
            ]
        )
    titles = ["encoder / decoder layers", "batch", "precision", "effasr, RTFx"]
    return markdown([*titles, "transformers, RTFx", "ratio", "revision"], lines)


def conversations() -> str:
    """Answers a second of a language model, against transformers."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in read("conversations", "system", "size", "answers", "cache", "slots", "device"):
        key = tuple(row[name] for name in ("answers", "size", "slots", "device"))
        found.setdefault(key, {})[f"{row['system']} {row['cache']}"] = row
    lines = []
    for (answers, size, slots, _), rows in found.items():
        theirs = float(rows["transformers contiguous"]["tokens_per_s"])
        for name, row in rows.items():
            if name.startswith("effasr"):
                ours = float(row["tokens_per_s"])
                rates = f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"
                lines.append([answers, size, slots, row["cache"], *rates, row["git"][:7]])
    titles = ["answers", "size", "slots", "cache", "effasr, tokens/s", "transformers, tokens/s"]
    return markdown([*titles, "ratio", "revision"], lines)


def straggler() -> str:
    """Throughput and loss with a slow node, as `profiling/studies/straggler_study.py` shows it."""
    import straggler_study

    return straggler_study.table(read("straggler"))


def compiled_counts() -> str:
    """Launches and bytes of operations, and of torch.compile for the same."""
    columns = ("launches_forward", "launches_backward", "bytes_forward", "bytes_backward")
    found: dict[tuple[str, str], list[str]] = {}
    for row in read("compiled_counts"):
        forward, backward, *sizes = (row[name] for name in columns)
        line = found.setdefault((f"`{row['part']}`", row["channels"]), [])
        line += [f"{forward} + {backward}", " + ".join(f"{float(x):.1f}" for x in sizes)]
    titles = ["operation", "channels", "launches", "bytes an element"]
    titles += ["torch.compile, launches", "bytes an element"]
    return markdown(titles, [[*key, *line] for key, line in found.items()])


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (
        *(training_summary, training, padding, ladder, whisper, decoder_depth, inference),
        *(conversations, straggler, streaming, audio_without_text, second_pass, speech_llm),
        *(compiled_counts, small_data, subsampling, other_language, experts),
    )
}


def updated(text: str) -> str:
    """The text of a page with current tables.

    Raises:
        ValueError: A mark names no table.
    """

    def table(match: re.Match[str]) -> str:
        if match[1] not in TABLES:
            names = ", ".join(TABLES)
            raise ValueError(f"`table: {match[1]}` must be one of {names}.")
        return f"{match[1]}{match[2]}\n{TABLES[match[1]]()}\n"

    return _TABLE.sub(table, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables, or check them; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only report outdated pages")
    options = parser.parse_args(arguments)
    outdated = []
    for name in PAGES:
        before = (ROOT / name).read_text(encoding="utf-8")
        if (after := updated(before)) != before:
            outdated.append(name)
            if not options.check:
                (ROOT / name).write_text(after, encoding="utf-8")
    for name in outdated:
        sys.stdout.write(f"{name}: {'outdated' if options.check else 'written'}\n")
    return 1 if options.check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())

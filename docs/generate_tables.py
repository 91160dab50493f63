"""Writes the tables of README.md and docs/, and pictures, from profiling/results/*.csv.

    python docs/generate_tables.py [--check]

Each table stands between the lines ``<!-- table: NAME -->`` and ``<!-- end -->``; text around it is
kept. --check writes nothing, and exits with 1 if a page or a picture is not up to date.
"""

import argparse
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "profiling")]

from benchmarks import harness as results  # noqa: E402 (found on the path above)

from effasr.planning.report import Panel, draw  # noqa: E402
from effasr.planning.report import percent as whole_percent  # noqa: E402

PAGES = (
    *("README.md", "docs/audio-without-text.md", "docs/benchmarks.md", "docs/kernels.md"),
    *("docs/architecture.md", "docs/batching.md", "docs/distributed.md", "docs/finetuning.md"),
    *("docs/new-language.md", "docs/speech-language-models.md", "docs/transcription.md"),
)
Row = dict[str, str]
Groups = dict[tuple[str, ...], list[Row]]
_TABLE = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.S)


def read(name: str, *keys: str) -> list[Row]:
    """Read the rows of a file of results; of rows with equal keys, only the newest."""
    rows = list(results.read(ROOT / "profiling/results" / f"{name}.csv"))
    if not rows:
        raise ValueError(f"profiling/results/{name}.csv must have rows, but has none.")
    if not keys:
        return rows
    newest: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        if key not in newest or newest[key]["date"] <= row["date"]:
            newest[key] = row
    return list(newest.values())


def grouped(rows: Iterable[Row], *columns: str) -> Groups:
    groups: Groups = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def markdown(titles: Sequence[str], lines: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Format a table; the first ``texts`` columns are aligned to the left."""
    rule = ["---"] * texts + ["---:"] * (len(titles) - texts)
    return "".join(f"| {' | '.join(line)} |\n" for line in [titles, rule, *lines])


def percent(share: str) -> str:
    """A share as percent, to three digits."""
    return f"{100 * float(share):.3g}" if float(share) else "0"


def tenths(share: str) -> str:
    """A share as percent, with one decimal."""
    return f"{100 * float(share):.1f}"


def over_seeds(values: Sequence[float], digits: int) -> str:
    """The mean and the extremes."""
    if not values:
        return "-"
    low, high, mean = min(values), max(values), statistics.mean(values)
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def mean(rows: Iterable[Row], column: str) -> float | None:
    values = [float(row[column]) for row in rows if row[column] != ""]
    return statistics.mean(values) if values else None


# Training, padding and batching

SYSTEMS = ("packed_static", "packed", "sync_bucketed_2d", "random", "transformers")
LENGTHS = {
    "librispeech_dev-clean+librispeech_test-clean": "LibriSpeech dev+test-clean",
    "librispeech_train-clean-100_ge3s": "LibriSpeech train-clean-100, 3 s and longer",
    "earnings22_sentences": "Earnings-22, sentences",
    "ami_only_words_segments": "AMI, segments",
}


def training_rows(*, on_gpu: bool = False) -> list[Row]:
    """The rows of training on a CPU or on GPUs."""
    keys = ("device", "system", "model", "precision", "threads", "frame_budget", "mode")
    return [row for row in read("training", *keys) if row["device"].startswith("cpu") != on_gpu]


def training() -> str:
    """Throughput, step time and padding of every system."""
    titles = ["model", "frame budget", "system", "audio s / s", "step, s", "audio s / step"]
    titles += ["padding: frames %", "tokens %", "useful TFLOP/s"]
    titles += ["precision, threads, mode", "revision"]
    models = list(dict.fromkeys(row["model"] for row in training_rows()))

    def order(row: Row) -> tuple[int, int, int]:
        budget, system = int(row["frame_budget"]), SYSTEMS.index(row["system"])
        return models.index(row["model"]), budget, system

    lines = []
    for row in sorted(training_rows(), key=order):
        speed, step, low, high = (
            float(row[name]) for name in ("audio_s_per_s", "step_s", "p20_s", "p80_s")
        )
        lines.append(
            [
                *(row["model"], f"{int(row['frame_budget']):,}", row["system"]),
                f"{speed:.0f}" if speed > 50 else f"{speed:.1f}",
                f"{step:.3f} ({low:.3f} to {high:.3f})",
                f"{float(row['audio_s']):.0f}",
                *(percent(row[f"padding_{kind}"]) for kind in ("frames", "tokens")),
                row["tflops_useful"],
                f"{row['precision']}, {row['threads']}, {row['mode']}",
                f"{row['git'][:7]}, {row['date'][:10]}",
            ]
        )
    return markdown(titles, lines, texts=3)


def gpu_training() -> str:
    """Throughput, step time, share of the peak of matrix products and memory on a GPU."""
    peaks: dict[str, float] = {}
    for row in read("matmul_peak"):
        peaks[row["device"]] = max(peaks.get(row["device"], 0.0), float(row["tflop_per_s"]))
    lines = [
        [
            *(row["model"], row["system"], row["mode"]),
            f"{float(row['audio_s_per_s']):,.0f}",
            f"{1e3 * float(row['step_s']):.1f}",
            f"{float(row['tflops_useful']):.0f}",
            percent(str(float(row["tflops_useful"]) / peaks[row["device"]])),
            percent(row["padding_frames"]),
            f"{int(row['peak_bytes']) / 1e9:.1f}",
            _where(row),
        ]
        for row in sorted(training_rows(on_gpu=True), key=lambda row: row["model"])
    ]
    titles = ["model", "system", "mode", "audio s / s", "step, ms", "useful TFLOP/s"]
    titles += ["% of the peak", "padding of frames %", "memory, GB", "where"]
    return markdown(titles, lines, texts=3)


def gpu_encoder() -> str:
    """Forward and backward of an encoder on a GPU."""
    rows = read("encoder", "system", "mode", "utterances", "seconds", "device")
    lines = [
        [
            *(f"{row['utterances']} x {row['seconds']} s", row["system"], row["mode"]),
            *(f"{float(row['step_ms']):.1f}", f"{float(row['audio_s_per_s']):,.0f}"),
            *(f"{int(row['peak_bytes']) / 1e9:.1f}", _where(row)),
        ]
        for row in rows
    ]
    titles = ["batch", "system", "mode", "ms", "audio s / s", "memory, GB", "where"]
    return markdown(titles, lines, texts=3)


def gpu_ops() -> str:
    """Forward and backward of operations on a GPU, with those of other projects."""
    rows = read("ops", "op", "kind", "backend", "shape", "mode", "device")
    chosen = [row for row in rows if row["mode"] == "forward+backward"]
    lines = []
    for (op, kind, shape, _), group in grouped(chosen, "op", "kind", "shape", "device").items():
        ours = [row for row in group if not row["backend"].startswith("peer: ")]
        best = min(float(row["p50_ms"]) for row in ours)
        peers = sorted((x for x in group if x not in ours), key=lambda x: float(x["p50_ms"]))
        lines.append(
            [
                *(f"`{op}` {kind}".strip(), shape),
                ", ".join(f"{x['backend']} {float(x['p50_ms']):.3f}" for x in ours),
                ", ".join(
                    f"{x['backend'].removeprefix('peer: ')} {float(x['p50_ms']):.3f}"
                    f" ({float(x['p50_ms']) / best:.2f}x)"
                    for x in peers
                )
                or "-",
                f"{min(int(x['peak_bytes']) for x in ours) / 1e9:.2f}",
                _where(group[0]),
            ]
        )
    titles = [
        "operation",
        "shape",
        "ours, ms",
        "others, ms (times our best)",
        "memory, GB",
        "where",
    ]
    return markdown(titles, lines, texts=4)


def _where(row: Row) -> str:
    """GPU, revision and date of a row."""
    return f"{row['device'].removeprefix('NVIDIA ')}, {row['git'][:7]}, {row['date'][:10]}"


def padding() -> str:
    """Padding by corpus, frame budget and strategy."""
    titles = ["lengths", "frame budget", "strategy", "frames %", "tokens %", "FLOPs %", "T x U %"]
    titles += ["imbalance p99 %", "utterances a batch"]
    kinds = ("frames", "tokens", "flops", "cells")
    lines = [
        [
            *(LENGTHS.get(row["lengths"], row["lengths"]), f"{int(row['frame_budget']):,}"),
            row["strategy"],
            *(percent(row[f"padding_{kind}"]) for kind in kinds),
            percent(row["rank_imbalance_p99"]),
            f"{float(row['batch_utterances']):.0f}",
        ]
        for row in read("padding")
    ]
    return markdown(titles, lines, texts=3)


def what_if() -> str:
    """Batches, time and GPUs at the memory of a micro-batch, by strategy."""
    titles = ["lengths", "strategy", "audio s a batch", "memory used %", "FLOPs that are padding %"]
    titles += ["steps", "time", "GPUs for packed's batch"]
    lines = [
        [
            *(LENGTHS.get(row["lengths"], row["lengths"]), row["strategy"]),
            f"{float(row['batch_audio_seconds']):.0f}",
            *(percent(row[name]) for name in ("memory", "padding_flops")),
            *(row["steps"], f"{float(row['relative_time']):.2f}", row["gpus_for_batch"]),
        ]
        for row in read("what_if")
        if row["strategy"] not in ("random", "sync_bucketed")
    ]
    return markdown(titles, lines, texts=2)


def mixed_batches() -> str:
    """Speech and text by strategy and iteration."""
    titles = ["lengths", "strategy, iteration", "steps", "FLOPs that are padding %"]
    titles += ["waiting for the slowest rank %", "time", "core s"]
    lines = [
        [
            *(LENGTHS[row["lengths"]], row["strategy"], row["steps"]),
            *(percent(row[name]) for name in ("padding_flops", "waiting")),
            *(f"{float(row['relative_time']):.2f}", f"{float(row['core_s']):.0f}"),
        ]
        for row in read("mixed_batches")
    ]
    return markdown(titles, lines, texts=2)


def forgetting() -> str:
    """Errors in both languages of a model that learnt the second later."""
    errors: dict[str, dict[str, str]] = defaultdict(dict)
    for row in read("forgetting"):
        errors[row["system"]][row["language"]] = percent(row["wer"])
    lines = [[name, by["en"], by.get("de", "")] for name, by in errors.items()]
    return markdown(["trained", "English WER %", "German WER %"], lines, texts=1)


def loading() -> str:
    """Audio that a core loads, by the storage of a corpus."""
    speeds: dict[str, dict[str, float]] = defaultdict(dict)
    for row in read("loading"):
        speeds[row["source"]][row["overrides"]] = float(row["audio_s_per_cpu_s"])
    columns = {"one speed": "data.speed_perturbation=[1.0]", "three speeds, as `small`": ""}
    lines = [
        [name, *(f"{by[key]:,.0f}" if key in by else "" for key in columns.values())]
        for name, by in speeds.items()
    ]
    return markdown(["source", *columns], lines, texts=1)


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


def straggler_groups() -> Groups:
    """Rows that differ in their seed alone, by network, slowdown and strategy."""
    groups = grouped(read("straggler"), "rate_mbit", "slowdown", "strategy")
    return dict(sorted(groups.items(), key=lambda item: (item[0][0], float(item[0][1]))))


def straggler() -> str:
    """Throughput and loss with a slow node: means over seeds."""
    titles = ["one node slower", "strategy", "samples / s (of even nodes %)", "loss at equal time"]
    titles += ["loss at equal samples", "consensus distance", "staleness", "steps of the nodes"]
    groups = straggler_groups()
    speeds = {key: mean(rows, "samples_per_s") or 0.0 for key, rows in groups.items()}
    rule = ["---", "---", *["---:"] * 5, "---", "---:"]
    lines = [[*titles, "seeds"], rule]
    for (rate, slowdown, strategy), rows in groups.items():
        speed = speeds[rate, slowdown, strategy]
        even = speeds.get((rate, "1", strategy))
        columns = ("loss_at_time", "loss_at_samples", "consensus", "staleness")
        figures = [mean(rows, column) for column in columns]
        steps = zip(*(map(int, row["node_steps"].split()) for row in rows), strict=True)
        lines.append(
            [
                f"{slowdown} x" + (f", {rate} Mbit/s" if rate else ""),
                strategy,
                f"{speed:.1f}" + (f" ({100 * speed / even:.0f})" if even else ""),
                *("" if value is None else f"{value:.3g}" for value in figures),
                " ".join(f"{statistics.mean(of_node):.0f}" for of_node in steps),
                str(len(rows)),
            ]
        )
    head, _, *body = ("| " + " | ".join(line) + " |\n" for line in lines)
    return "".join([head, f"|{'|'.join(rule)}|\n", *body])


# Recognition and inference

AUDIO_SYSTEMS = {
    "supervised": "transcripts alone",
    "noisy_student_1": "noisy student, first generation",
    "noisy_student_2": "noisy student, second generation",
    "teacher": "a teacher in the loop, from the model of the transcripts",
    "teacher_x4_rule": "the same with four times the batch, and the average's rule",
    "teacher_x4_plain": "the same with four times the batch, without the rule",
    "best_rq": "BEST-RQ, then the transcripts",
    "oracle": "all 3 hours transcribed",
}
TEXT_SYSTEMS = {
    "best": "the search as it is",
    "oracle": "the best of its 16 texts",
    "tuned": "tuned shares of CTC and lengths",
    "fusion": "n-grams over tokens in the search",
    "word_fusion": "n-grams over words in the search",
    "second_pass": "a second pass by n-grams over words",
    "corrector": "a corrector",
}
LLM_SYSTEMS = {"text": "text", "joint": "speech and text", "speech_only": "speech alone"}


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


def audio_without_text() -> str:
    """Word errors of ways to use audio without text."""
    titles = ["system", "updates", "core s", "seeds", "word errors: mean, least and most"]
    by_system = grouped(read("audio_without_text", "system", "seed"), "system")
    lines = []
    for system, name in AUDIO_SYSTEMS.items():
        rows = by_system[(system,)]
        errors = [100 * float(row["wer"]) for row in rows]
        extremes = f" ({min(errors):.1f} to {max(errors):.1f})" if len(rows) > 1 else ""
        lines.append(
            [
                name,
                f"{int(rows[0]['updates']):,}",
                f"{mean(rows, 'cpu_s'):.0f}",
                str(len(rows)),
                f"{statistics.mean(errors):.1f} %{extremes}",
            ]
        )
    return markdown(titles, lines)


def second_pass() -> str:
    """Word errors of ways to use texts."""
    by_system = grouped(read("second_pass", "run", "method", "system"), "system", "method")
    lines = [
        [
            name,
            *(
                over_seeds([100 * float(row["wer"]) for row in by_system.get((system, way), ())], 2)
                for way in ("attention", "ctc")
            ),
        ]
        for system, name in TEXT_SYSTEMS.items()
    ]
    return markdown(["word errors, %", "attention decoder", "CTC"], lines)


def causal_second_pass() -> str:
    """Word errors after a choice by language models, by their size and vocabulary."""
    keys = ("corpus", "method", "input", "rescoring", "layers", "width", "vocabulary", "positions")
    shown = {"none": "the search as it is", "tuned": "tuned shares of CTC and lengths"}
    shown["n-gram"] = "n-grams over words"
    lines = []
    for key, group in grouped(read("causal_second_pass", *keys, "seed"), *keys).items():
        corpus, method, recording, rescoring, layers, width, vocabulary, positions = key
        units = "characters" if vocabulary == "0" else f"{vocabulary} pieces"
        causal = f"causal, {layers} x {width}, {units}, {positions} positions"
        errors = [[float(row[name]) for row in group] for name in ("wer", "cer")]
        errors = [over_seeds(x, 2) if len(x) > 1 else f"{x[0]:.2f}" for x in errors]
        lines.append(
            [
                f"{corpus}, {recording or 'utterances'}, {method}",
                shown.get(rescoring, causal),
                *errors,
            ]
        )
    return markdown(["speech, search", "second pass", "WER %", "CER %"], lines, texts=2)


def speech_llm() -> str:
    """What systems of the speech language model's study reach."""
    titles = ["trained on", "updates", "core s", "transcribing, WER %", "translating, WER %"]
    titles.append("perplexity of written answers")
    rows = read("speech_llm", "system", "seed", "updates", "instruction")
    systems = list(LLM_SYSTEMS)
    lines = []
    for (system, updates), group in sorted(
        grouped(rows, "system", "updates").items(),
        key=lambda item: (systems.index(item[0][0]), int(item[0][1])),
    ):
        errors = [
            [100 * float(row["wer"]) for row in group if row["instruction"].startswith(verb)]
            for verb in ("Transcribe", "Translate")
        ]
        by_seed = {row["seed"]: row for row in group}.values()
        perplexities = [float(row["text_perplexity"]) for row in by_seed]
        cells = [over_seeds(values, 1) for values in errors]
        spent = f"{mean(by_seed, 'cpu_s'):.0f}"
        name = LLM_SYSTEMS[system]
        lines.append([name, f"{int(updates):,}", spent, *cells, over_seeds(perplexities, 2)])
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
    """Word error rate of each seed, and mean RTFx, by speech, depth and search."""
    titles = [
        "speech, encoder / decoder layers",
        "steps",
        "greedy, WER %",
        "RTFx",
        "joint, WER %",
        "RTFx",
    ]
    lines = []
    keys = "speech", "encoder_layers", "decoder_layers", "steps"
    for (speech, *depth, steps), rows in grouped(read("decoder_depth"), *keys).items():
        line = [f"{speech}, {' / '.join(depth)}", f"{int(steps):,}"]
        for greedy in (True, False):
            group = [row for row in rows if (row["search"] == "greedy") is greedy]
            errors = ", ".join(f"{float(row['wer']):.3g}" for row in group)
            line += [errors, f"{mean(group, 'rtfx'):.0f}"]
        lines.append(line)
    return markdown(titles, lines)


def inference() -> str:
    """RTFx by depth and batch, against transformers."""
    rows = read("inference", "system", "shape", "size", "batch", "dtype", "device")
    groups = grouped(rows, "shape", "batch", "dtype", "device")
    lines = []
    for key, group in sorted(groups.items(), key=lambda item: (item[0][3][:3], int(item[0][1]))):
        by_system = {row["system"]: row for row in group}
        ours, peer = (
            float(by_system[name]["rtfx"]) if name in by_system else None
            for name in ("effasr", "transformers")
        )
        speeds = ["-" if x is None else f"{x:,.0f}" for x in (ours, peer)]
        speeds.append(f"{ours / peer:.2f}" if ours and peer else "-")
        lines.append([*key[:3], *speeds, key[3].split()[-1], group[0]["git"][:7]])
    titles = ["encoder / decoder layers", "batch", "precision", "effasr, RTFx"]
    return markdown([*titles, "transformers, RTFx", "ratio", "machine", "revision"], lines)


def conversations() -> str:
    """Answers a second of a language model, against transformers."""
    rows = read("conversations", "system", "size", "answers", "cache", "slots", "device")
    lines = []
    for key, group in grouped(rows, "answers", "size", "slots", "device").items():
        by_system = {f"{row['system']} {row['cache']}": row for row in group}
        peer = float(by_system["transformers contiguous"]["tokens_per_s"])
        for row in group:
            if row["system"] == "effasr":
                ours = float(row["tokens_per_s"])
                rates = f"{ours:.0f}", f"{peer:.0f}", f"{ours / peer:.2f}"
                lines.append([*key[:3], row["cache"], *rates, row["git"][:7]])
    titles = ["answers", "size", "slots", "cache", "effasr, tokens/s", "transformers, tokens/s"]
    return markdown([*titles, "ratio", "revision"], lines)


def compiled_counts() -> str:
    """Launches and bytes of operations, and of torch.compile for the same."""
    columns = ("launches_forward", "launches_backward", "bytes_forward", "bytes_backward")
    lines: dict[tuple[str, str], list[str]] = {}
    for row in read("compiled_counts"):
        forward, backward, *sizes = (row[name] for name in columns)
        line = lines.setdefault((f"`{row['part']}`", row["channels"]), [])
        line += [f"{forward} + {backward}", " + ".join(f"{float(x):.1f}" for x in sizes)]
    titles = ["operation", "channels", "launches", "bytes an element"]
    titles += ["torch.compile, launches", "bytes an element"]
    return markdown(titles, [[*key, *line] for key, line in lines.items()])


# Little speech, and experts

CORPORA = {"en": "English, 1.2 h", "nl": "Dutch, 0.6 h", "en+nl": "both"}
CORPORA["speechocean"] = "108 speakers, 2.4 h"
ERRORS = ("WER % (joint search)", "WER % (CTC)", "CER % (joint search)", "CER % (CTC)")
NETWORKS = {
    "dense": "dense",
    "named": "experts by name of the source",
    "learned": "experts by a router",
}


def _searches(study: str) -> list[tuple[Row, Row]]:
    """The rows of a study in pairs, of the joint search and of CTC."""
    rows = (row for row in read("small_data") if row["study"] == study)
    groups = grouped(rows, "toolkit", "configuration", "corpus", "vocabulary", "cpu_s")
    pairs = [{row["decoding"]: row for row in group} for group in groups.values()]
    return [(pair["joint"], pair["ctc"]) for pair in pairs if len(pair) == 2]


def _work(row: Row) -> tuple[str, str]:
    return f"{float(row['cpu_s']):.0f}", f"{int(row['steps']):,}"


def _errors(pair: tuple[Row, Row]) -> list[str]:
    return [tenths(row[measure]) for measure in ("wer", "cer") for row in pair]


def small_data() -> str:
    """Errors of effasr and SpeechBrain after the same CPU time."""
    lines = []
    for pair in _searches("same CPU time, 800 s") + _searches("same CPU time, 1100 s"):
        row = pair[0]
        toolkit = "effasr, `small`" if row["toolkit"] == "effasr" else "SpeechBrain 1.1.2"
        hours = f"{float(row['audio_s']) / 3600:.1f}"
        lines.append([CORPORA[row["corpus"]], toolkit, *_work(row), hours, *_errors(pair)])
    titles = ["corpus", "toolkit", "core s", "steps", "audio heard, h", *ERRORS]
    return markdown(titles, lines, texts=2)


def small_corpora() -> str:
    """Audio until CTC leaves its plateau, by seed."""
    lines = []
    for cell, rows in grouped(read("small_corpora", "cell", "seed"), "cell").items():
        each = lambda text, rows=rows: "; ".join(map(text, rows))
        lines.append(
            [
                *cell,
                each(lambda row: row["plateau_s"].replace("never", "-")),
                rows[0]["audio_s"],
                each(lambda row: f"{float(row['ctc_of_blind']):.2f}"),
                each(lambda row: tenths(row["cer"])),
            ]
        )
    titles = ["corpus, step, masks", "s until 0.8 of blind", "s in all"]
    return markdown([*titles, "CTC of blind", "CER %"], lines)


def optimizers() -> str:
    """Errors of Muon and AdamW by schedule, at about equal seconds."""
    lines = []
    table = read("optimizers", "configuration", "steps", "seed")
    for (name, steps), rows in grouped(table, "configuration", "steps").items():
        costs = statistics.mean(float(row["cpu_s"]) for row in rows)
        lines.append([name, steps, f"{costs:.0f}", _wer(rows), str(len(rows))])
    return markdown(
        ["optimizer, schedule, recipe", "steps", "core s", "WER % (CTC)", "seeds"], lines
    )


def large_batches() -> str:
    """Errors of larger batches at equal samples, by rule and strategy."""
    lines = []
    table = read("large_batches")
    for key, rows in grouped(table, "k", "strategy", "ranks", "rule").items():
        steps = statistics.mean(float(row["steps"]) for row in rows)
        lines.append([*key, f"{steps:.0f}", _wer(rows), str(len(rows))])
    return markdown(
        ["batch", "strategy", "processes", "rate", "updates", "WER % (CTC)", "seeds"], lines
    )


def hosts() -> str:
    """Speed and loss of eight hosts by network and strategy."""
    titles = ["network", "strategy", "steps", "steps a minute", "loss at the end", "seeds"]
    lines = []
    for key, rows in grouped(read("hosts"), "network", "strategy", "steps").items():
        figures = f"{60 * (mean(rows, 'steps_per_s') or 0):.1f}", f"{mean(rows, 'loss'):.2f}"
        lines.append([*key, *figures, str(len(rows))])
    return markdown(titles, lines)


def _wer(rows: Iterable[Row]) -> str:
    return _of_seeds([float(row["wer"]) for row in rows])


def subsampling() -> str:
    """Errors of the recipe `small` by subsampling and vocabulary."""
    lines = []
    for _, ctc in _searches("ladder"):
        factor = "8x" if "8x" in ctc["configuration"] else "4x"
        step = float(ctc["cpu_s"]) / int(ctc["steps"])
        errors = tenths(ctc["wer"]), tenths(ctc["cer"])
        setting = f"{factor}, {ctc['vocabulary']}"
        lines.append([setting, f"{step:.3f}", f"{int(ctc['steps']):,}", *errors])
    titles = ["subsampling, pieces", "core s a step", "steps", "WER % (CTC)", "CER % (CTC)"]
    return markdown(titles, lines)


def other_language() -> str:
    """Errors in Dutch, from scratch and from a model of English."""
    is_tuned = lambda pair: pair[0]["configuration"].startswith("fine-tuned")
    pairs = [pair for pair in _searches("fine-tuning") if pair[0]["corpus"].startswith("nl-")]
    pairs.sort(key=lambda pair: (pair[0]["corpus"], is_tuned(pair), _work(pair[0])))
    lines = []
    for pair in pairs:
        minutes = pair[0]["corpus"].removeprefix("nl-").removesuffix("min")
        way = "fine-tuned" if is_tuned(pair) else "from scratch"
        lines.append([f"{minutes} minutes", way, *_work(pair[0]), *_errors(pair)])
    return markdown(["Dutch", "way", "core s", "steps", *ERRORS], lines, texts=2)


def whisper_finetuning() -> str:
    """Errors of Whisper, untouched and fine-tuned."""
    return _whisper_finetuning(lambda row: True)


def finetuning_summary() -> str:
    """Errors of Whisper base before and after LoRA, and by its peer, for the README."""
    return _whisper_finetuning(
        lambda row: (
            (row["size"], row["configuration"]) == ("base", "untouched")
            or "English" in row["configuration"]
            or "transformers" in row["configuration"]
        )
    )


def _whisper_finetuning(is_shown: Callable[[Row], bool]) -> str:
    columns = {
        "WER %": ("new", "own", "1"),
        "WER %, beam 5": ("new", "own", "5"),
        "WER %, windows of 30 s": ("new", "silence", "1"),
        "English WER %": ("en", "own", "1"),
        "English, windows of 30 s": ("en", "silence", "1"),
    }
    table = [row for row in read("whisper_finetuning") if is_shown(row)]
    lines = []
    for key, rows in grouped(table, "size", "configuration", "minutes").items():
        size, configuration, minutes = key
        language = rows[0]["evaluated"]
        # By seed: where a model has one language, that is evaluated as the new and as the old.
        errors: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
        for row in rows:
            evaluated = "new" if row["evaluated"] == language else row["evaluated"]
            errors[evaluated, row["windows"], row["beam"]][row["seed"]] = float(row["wer"])
        core_s = f"{statistics.mean(float(row['cpu_s'] or 0) for row in rows):.0f}"
        shown = [_of_seeds([*errors[cell].values()]) for cell in columns.values()]
        lines.append([f"{size}, {language}", configuration, minutes, core_s, *shown])
    return markdown(["model, language", "training", "minutes", "core s", *columns], lines, texts=2)


def _of_seeds(errors: list[float]) -> str:
    """Return the mean, and the range where there are several seeds."""
    if len(errors) < 2:
        return "".join(f"{error:.1f}" for error in errors)
    return f"{statistics.mean(errors):.1f} ({min(errors):.1f} to {max(errors):.1f})"


def whisper_windows() -> str:
    """Errors of Whisper, untouched, by the silence behind an utterance."""
    errors: dict[str, dict[int, str]] = {}
    for row in read("whisper_windows"):
        model = f"{row['size']}, {row['language']}"
        errors.setdefault(model, {})[int(row["window"])] = f"{float(row['wer']):.1f}"
    windows = sorted({window for row in errors.values() for window in row}, reverse=True)
    lines = [[model, *(row.get(window, "") for window in windows)] for model, row in errors.items()]
    return markdown(["model, language", *(f"{window} s" for window in windows)], lines)


def whisper_speed() -> str:
    """Speed of transcribing with Whisper, beside CTranslate2 with int8 on as many threads."""
    rows = read("whisper_speed")
    speed = lambda row: float(row["audio_s_per_cpu_s"])
    peers = {
        (row["files"], row["threads"]): speed(row)
        for row in rows
        if (row["system"], row["precision"]) == ("faster_whisper", "int8")
    }
    lines = [
        [
            *(row["files"], row["system"], row["precision"], f"{row['window']} s", row["batch"]),
            row["threads"],
            *(f"{speed(row):.1f}", f"{speed(row) / peers[row['files'], row['threads']]:.2f}"),
            f"{float(row['wer']):.1f}",
        ]
        for row in sorted(rows, key=lambda row: (row["files"], row["system"], speed(row)))
    ]
    titles = ["files", "system", "precision", "window", "batch", "threads", "audio s / core s"]
    return markdown([*titles, "of faster-whisper int8", "WER %"], lines, texts=3)


def experts() -> str:
    """Errors of three seeds by number of updates and kind of network."""
    rows = sorted(read("experts"), key=lambda row: int(row["seed"]))
    groups = grouped(rows, "updates", "system")
    lines = [
        [
            updates,
            *(
                ", ".join(tenths(row["error"]) for row in groups[updates, name])
                for name in NETWORKS
            ),
        ]
        for updates in sorted({updates for updates, _ in groups}, key=int)
    ]
    return markdown(["updates", *(f"{name}, errors %" for name in NETWORKS.values())], lines)


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (
        *(training, padding, what_if, loading, ladder, whisper, decoder_depth, inference),
        *(conversations, straggler, streaming, audio_without_text, second_pass, speech_llm),
        causal_second_pass,
        *(compiled_counts, small_data, optimizers, large_batches, hosts, subsampling),
        *(other_language, whisper_finetuning, mixed_batches, forgetting),
        *(whisper_windows, whisper_speed, experts, small_corpora, finetuning_summary),
        *(gpu_training, gpu_encoder, gpu_ops),
    )
}


def padding_picture() -> str:
    rows = [row for row in read("padding") if row["frame_budget"] == "8000"]
    panels = []
    for title in ("frames", "tokens", "FLOPs"):
        shares = [float(row[f"padding_{title.lower()}"]) for row in rows]
        labels = list(map(whole_percent, shares))
        panels.append(Panel(f"{title}: padding %", [1 - x for x in shares], labels, shares))
    return draw(
        [row["strategy"] for row in rows],
        panels,
        title="Padding, by sampling strategy",
        legend=("utterances", "padding"),
        groups=[f"{row['lengths']}, 8,000 frames a batch" for row in rows],
    )


def ladder_picture() -> str:
    rows = read("ladder")
    column = lambda name, scale=1.0: [scale * float(row[name]) for row in rows]
    shares, seconds = column("padding_flops"), column("batch_audio_seconds")
    work, measured = column("flops_per_audio_hour", 1e-12), column("cpu_seconds_per_audio_hour")
    labels = lambda values, digits: [f"{value:.{digits}f}" for value in values]
    panels = [
        Panel(
            *("padding, % of FLOPs", [1 - x for x in shares], list(map(whole_percent, shares))),
            rest=shares,
        ),
        Panel("mean batch, s of audio", seconds, labels(seconds, 0)),
        Panel("predicted, TFLOP / audio h", work, labels(work, 1)),
        Panel("measured, CPU s / audio h", measured, labels(measured, 1)),
    ]
    return draw(
        [row["strategy"] for row in rows],
        panels,
        title=f"The same audio, {rows[0]['lengths']}",
        subtitle="5,323 utterances, 8 ranks, 8,000 encoder frames a micro-batch",
        legend=("utterances", "padding"),
    )


def straggler_picture() -> str:
    groups = straggler_groups()
    columns = [
        ("samples / s", "samples_per_s", ".1f"),
        ("loss, equal time", "loss_at_time", ".2f"),
        ("loss, equal samples", "loss_at_samples", ".2f"),
    ]
    panels = []
    for title, name, form in columns:
        values = [mean(rows, name) for rows in groups.values()]
        labels = ["-" if value is None else format(value, form) for value in values]
        panels.append(Panel(title, [value or 0.0 for value in values], labels))
    (first, *_), *_ = groups.values()
    alike = lambda slowdown: slowdown == "1"
    return draw(
        [strategy for _, _, strategy in groups],
        panels,
        title="Training with a slow node",
        subtitle=f"{first['nodes']} nodes of {first['per_node']} processes, {first['base_s']} s a "
        "step, mostly sleep",
        groups=[
            "all nodes alike" if alike(slowdown) else f"one node {slowdown} x slower"
            for _, slowdown, _ in groups
        ],
    )


PICTURES = {
    "profiling/results/padding.svg": padding_picture,
    "profiling/results/ladder.svg": ladder_picture,
    "profiling/results/straggler.svg": straggler_picture,
}


def updated(text: str) -> str:
    """The text of a page with current tables."""

    def table(match: re.Match[str]) -> str:
        if match[1] not in TABLES:
            names = ", ".join(TABLES)
            raise ValueError(f"`table: {match[1]}` must be one of {names}.")
        return f"{match[1]}{match[2]}\n{TABLES[match[1]]()}\n"

    return _TABLE.sub(table, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only report outdated pages")
    options = parser.parse_args(arguments)
    made = {name: updated((ROOT / name).read_text(encoding="utf-8")) for name in PAGES}
    made |= {name: picture() for name, picture in PICTURES.items()}
    outdated = False
    for name, text in made.items():
        if text != (ROOT / name).read_text(encoding="utf-8"):
            outdated = True
            if not options.check:
                (ROOT / name).write_text(text, encoding="utf-8")
            sys.stdout.write(f"{name}: {'outdated' if options.check else 'written'}\n")
    return 1 if options.check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())

"""Benchmarks, one subcommand each: python profiling/bench.py SUBCOMMAND [OPTIONS] or --help."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

SUBCOMMANDS = {
    "ops": ("benchmarks.ops", "every operation against its peers, forward and with the backward"),
    "training": ("benchmarks.training", "training steps, packed against padded, and of transformers"),
    "inference": ("benchmarks.inference", "transcription by depth, of transformers, and of streams"),
    "conversations": ("benchmarks.conversations", "answers of a language model, and of transformers"),
    "whisper": ("bench_whisper", "Whisper on a CPU: fine-tuning and transcription"),
    "loading": ("bench_loading", "reading audio, by storage, workers and augmentation"),
    "planning": ("bench_planning", "planning an epoch"),
    "corpus": ("bench_corpus", "the start of a training with millions of utterances"),
    "host": ("bench_host", "the host's time for a call of each operation"),
    "counts": ("kernel_counts", "instructions, sectors and bank conflicts of kernels, emulated"),
    "compiled": ("compiled_counts", "launches and bytes, and of torch.compile for the same"),
    "tiles": ("attention_tiles", "attention's backward for several sizes of its tiles"),
    "launch": ("launch_kernels", "kernels compiled ahead, or run once for a profiler"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    name, *options = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name not in SUBCOMMANDS:
        lines = [f"    {name:14} {about}" for name, (_, about) in SUBCOMMANDS.items()]
        sys.stdout.write("\n".join([(__doc__ or "").strip(), "", *lines, ""]))
        return 0 if name in ("-h", "--help") else 2
    here = Path(__file__).parent
    sys.path += [str(here / folder) for folder in ("", "data", "kernels")]
    module = importlib.import_module(SUBCOMMANDS[name][0])
    return module.main(options) or 0


if __name__ == "__main__":
    sys.exit(main())

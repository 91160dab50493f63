"""Benchmarks, one subcommand each: python profiling/bench.py SUBCOMMAND [OPTIONS] or --help."""

import importlib
import sys
from collections.abc import Sequence

# Module and function of `benchmarks`, and a line of help.
SUBCOMMANDS = {
    "ops": ("ops", "main", "every operation against its peers, forward and with the backward"),
    "training": ("training", "main", "steps, packed against padded, and of transformers"),
    "encoder": ("encoder", "main", "an encoder's step, and that of transformers"),
    "inference": ("inference", "main", "transcription by depth, and of transformers"),
    "loading": ("loading", "main", "audio that a core loads, by the storage of a corpus"),
    "host": ("kernels", "host", "the host's time for a call of each operation"),
    "counts": ("kernels", "counts", "instructions, sectors and bank conflicts, emulated"),
    "tiles": ("kernels", "tiles", "attention's backward for several sizes of its tiles"),
    "launch": ("kernels", "launch", "kernels compiled ahead, or run once for a profiler"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    name, *options = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name not in SUBCOMMANDS:
        lines = [f"    {name:14} {about}" for name, (*_, about) in SUBCOMMANDS.items()]
        sys.stdout.write("\n".join([(__doc__ or "").strip(), "", *lines, ""]))
        return 0 if name in ("-h", "--help") else 2
    module, function, _ = SUBCOMMANDS[name]
    return getattr(importlib.import_module(f"benchmarks.{module}"), function)(options)


if __name__ == "__main__":
    sys.exit(main())

"""A process that holds one system: it answers requests, one line of JSON each, until they end."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from whisper_bench.settings import Settings
from whisper_bench.system import System, high_water_mark


def build(settings: Settings, system: str) -> System:
    """Read the model of a system.

    Raises:
        ImportError: A package that it needs is not installed.
        ValueError: It cannot compute what it is asked for.
    """
    if settings.task == "finetune":
        from whisper_bench.finetuning import EffasrSteps, TransformersSteps

        kind = TransformersSteps if system == "transformers" else EffasrSteps
        return kind(settings, system)
    from whisper_bench.transcribing import CTranslate2Passes, EffasrPasses, TransformersPasses

    if system == "transformers":
        return TransformersPasses(settings, system)
    if system.startswith("ctranslate2"):
        return CTranslate2Passes(settings, system)
    return EffasrPasses(settings, system)


def main() -> int:
    """Serve the system that the command line names; returns the exit code."""
    # Packages print to standard output; only answers may go to the channel.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)

        def answer(make: Callable[[], dict[str, Any]]) -> bool:
            try:
                reply = make()
            except Exception as error:  # the benchmark says why, and goes on with the others
                traceback.print_exc()
                reply = {"error": str(error) or type(error).__name__}
            channel.write(json.dumps(reply) + "\n")
            channel.flush()
            return "error" not in reply

        held: list[System] = []

        def load() -> dict[str, Any]:
            settings, system = Settings.from_json(sys.argv[1]), sys.argv[2]
            import torch

            torch.set_num_threads(settings.threads)
            held.append(build(settings, system))
            return {"version": held[0].version, "base_bytes": held[0].base_bytes}

        if not answer(load):
            return 1
        requests: dict[str, Callable[..., dict[str, Any]]] = {
            "check": held[0].check,
            "run": held[0].run,
            "memory": lambda: {"peak_bytes": high_water_mark()},
        }
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            answer(lambda name=name, arguments=arguments: requests[name](*arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())

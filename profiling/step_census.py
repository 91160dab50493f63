"""Count launches, bytes and FLOPs of a training step, without a GPU.

    python profiling/step_census.py [--model canary_180m_flash] [--frame-budget 8448] [--json]
                                    [model.residual_in_fp32=false ...]
    python profiling/step_census.py --check             compare with the baseline
    python profiling/step_census.py --update-baseline   write results/step_census.json

A step of one micro-batch runs with dropout in bfloat16 on fake tensors of a made-up GPU: the
trainer does what it does on a real one, but operators of PyTorch and kernels are recorded. A
product has the FLOPs of `torch.utils.flop_counter`, an operation those of its own formula; a launch
has the bytes of the tensors that it reads and writes, each once. Multi-tensor operators have the
launches of PyTorch's builds for CUDA 13. The roofline is the sum over operators and calls of
operations of the time that an H200 takes at least: a bound, not a measurement. The JSON has
`launches_eager`, `launches_graph`, `bytes_between_per_frame_channel` (traffic of frames between
the matrix products and the kernels of an encoder layer) and their parts, and `programs_per_live`:
the programs of our kernels for each one whose tile has rows, in all and of each operation.

With more than 5 % more launches or bytes than the baseline, or in an operation more than 1.3
programs for each with rows, `--check` fails. If that is intended, update the baseline and commit
it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from census.report import growth, summarize, table
from census.step import record

BASELINE = Path(__file__).parent / "results" / "step_census.json"
_BUDGET, _MOST_GROWTH = 8_448, 0.05
_MODELS = ("canary_180m_flash", "canary_1b_flash")


def census(model: str, frame_budget: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    return summarize(record(model, frame_budget, overrides), model)


def update_baseline(path: Path) -> None:
    figures = {model: census(model, _BUDGET) for model in _MODELS}
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def check(baseline: dict[str, Any], models: Sequence[str]) -> list[str]:
    grown = (growth(baseline[model], census(model, _BUDGET), _MOST_GROWTH) for model in models)
    return [line for lines in grown for line in lines]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", help="fields of the recipe, such as model.residual_in_fp32=false"
    )
    parser.add_argument("--model", help="an architecture of effasr.model.presets")
    parser.add_argument("--frame-budget", type=int, help="frames of the micro-batch")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="compare with the baseline")
    action.add_argument("--update-baseline", action="store_true", help="write it anew")
    options = parser.parse_args(arguments)
    if options.check or options.update_baseline:
        return _gate(parser, options)
    try:
        budget = _BUDGET if options.frame_budget is None else options.frame_budget
        summary = census(options.model or _MODELS[0], budget, options.overrides)
    except ValueError as error:
        sys.stderr.write(f"step_census: {error}\n")
        return 2
    sys.stdout.write((json.dumps(summary, indent=1) if options.json else table(summary)) + "\n")
    return 0


def _gate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    unread = {"--frame-budget": options.frame_budget, "--json": options.json or None}
    unread |= {x: x for x in options.overrides}
    unread |= {"--model": options.model} if options.update_baseline else {}
    if unusable := [name for name, value in unread.items() if value is not None]:
        parser.error(
            f"the baseline has packed steps of {_BUDGET} frames of {' and '.join(_MODELS)}: "
            f"leave out {', '.join(unusable)}"
        )
    if options.update_baseline:
        update_baseline(options.baseline)
        return 0
    if options.model not in (None, *_MODELS):
        parser.error(f"the baseline has no {options.model}, only {', '.join(_MODELS)}")
    try:
        baseline = json.loads(options.baseline.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(
            f"--baseline must be a file that --update-baseline wrote, but is "
            f"{options.baseline}: {error}"
        )
    grown = check(baseline, [options.model] if options.model else _MODELS)
    if grown:
        grown.append(
            "make the step smaller again, or, if this is meant, run profiling/step_census.py "
            "--update-baseline and commit the file"
        )
    sys.stderr.write("".join(f"step_census: {line}\n" for line in grown))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())

"""Profile a few training steps with torch's own profiler, and write the report.

    python profiling/profile_step.py RECIPE [FIELD=VALUE ...] [--first 10] [--steps 3]
        [--layers] [--output profiles/step]

Trains RECIPE from its beginning, in a run directory of its own below --output, up to the last step
that is recorded; nothing is validated. Under torchrun every rank leaves a trace. Needs torch alone:
no Nsight Systems, and no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import report

from effasr import config as configuration
from effasr.training import trainer
from effasr.training.config import TrainConfig

NAME = "run"


def recipe_overrides(options: argparse.Namespace) -> list[str]:
    last = options.first + options.steps
    return [
        *options.override,
        f"name={NAME}",
        f"output={options.output}",
        "data.validation=[]",
        "training.restart=true",
        "training.tensorboard=false",
        f"training.max_steps={last}",
        "training.log_every=1",
        f"training.checkpoint_every={last}",
        "training.profile.tool=kineto",
        f"training.profile.first_step={options.first}",
        f"training.profile.steps={options.steps}",
        f"training.profile.layers={str(options.layers).lower()}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="as of `effasr train`")
    parser.add_argument("override", nargs="*", metavar="FIELD=VALUE", help="likewise")
    parser.add_argument("--first", type=int, default=10, help="first step that is recorded")
    parser.add_argument("--steps", type=int, default=3, help="how many are")
    parser.add_argument(
        "--layers", action="store_true", help="record shapes too; slower, so not for times"
    )
    parser.add_argument("--output", type=Path, default=Path("profiles/step"))
    options = parser.parse_intermixed_args(arguments)
    try:
        config = configuration.load(TrainConfig, options.recipe, recipe_overrides(options))
        code = trainer.run(config)
    except ValueError as error:
        sys.stderr.write(f"profile_step: {error}\n")
        return 2
    if code or int(os.environ.get("RANK", "0")):
        return code
    return report.main([str(options.output / NAME), "--output", str(options.output)])


if __name__ == "__main__":
    sys.exit(main())

"""Runs a study: a grid of commands from a YAML file, and rows of a table for each cell and seed.

    python profiling/study.py GRID [--set NAME=VALUE ...] [--only CELL ...] [--seeds N ...]
        [--csv TABLE.csv] [--work FOLDER] [--list]

GRID is a file, or the name of one in profiling/studies/. Rows are written to FOLDER/rows.csv, with
the digest of their cell, and with --csv to a table as well. A cell that has its rows is skipped,
and so is a stage that is complete: the command can be interrupted and repeated. Digests are of all
commands with their settings, so that nothing which other settings have made is used. A grid with a
revision runs in a checkout of it: the code of such a study has left the tree, its rows have not.
"""

# A grid has these fields. In its texts $NAME is a parameter, a field of the cell, `cell`, `seed`,
# `work`, `root`, `checkout`, or the folder of a stage, which is then run before; $out is the folder
# of the stage or row itself. Commands are effasr's, Python scripts, or `subset` (see below).
#
#     parameters: {NAME: TEXT}
#     seeds:      [0]
#     data:       {STAGE: COMMAND or COMMANDS}
#     stages:     the same, whose processor time and updates count (cpu_s, updates)
#     cells:      {CELL: {NAME: TEXT}}
#     rows:       [{command: TEXT, json: FILES, each: COLUMN, values: {COLUMN: TEXT}}]
#     columns:    [COLUMN], each from values, JSON, figures of the training, or names, in this order
#     from:       {COLUMN: PATH.IN.JSON}
#     percent:    [COLUMN]
#     revision:   COMMIT

import argparse
import hashlib
import json
import math
import os
import random
import re
import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from benchmarks import harness as tables

ROOT = Path(__file__).parents[1]
GRIDS = ROOT / "profiling" / "studies"
CELL = "cell"
LEFT = 0.8  # share of the CTC loss without audio below which a model has left the plateau
MEMORY_S = 2000.0  # seconds of audio after which a loss counts 1 / e in that share
FIELDS = {
    *("about", "parameters", "seeds", "data", "stages", "cells", "rows", "columns", "from"),
    *("percent", "revision"),
}


def load(name: str) -> dict[str, Any]:
    path = Path(name) if Path(name).suffix else GRIDS / f"{name}.yaml"
    if not path.is_file():
        grids = ", ".join(sorted(grid.stem for grid in GRIDS.glob("*.yaml")))
        raise ValueError(f"`GRID` must be a file or one of {grids}, but is {name}.")
    grid = yaml.safe_load(path.read_text(encoding="utf-8"))
    if unknown := set(grid) - FIELDS:
        raise ValueError(
            f"{path}: fields must be of {', '.join(sorted(FIELDS))}, but one is {min(unknown)}."
        )
    defaults = {"parameters": {}, "seeds": [0], "data": {}, "stages": {}, "cells": {"all": {}}}
    return {**defaults, "columns": [], "from": {}, "percent": [], "name": path.stem, **grid}


@dataclass(frozen=True)
class Job:
    """Commands with a folder, whose name has their digest."""

    folder: Path
    commands: list[str]


class Plan:
    """All commands of one cell and seed; nothing is run to make it."""

    def __init__(self, grid: dict[str, Any], cell: str, seed: int, work: Path) -> None:
        self.grid, self.work = grid, work
        self.label = f"{cell}, seed {seed}"
        self.names = {
            **{"study": grid["name"], "work": str(work), "root": str(ROOT)},
            **{CELL: cell, "seed": str(seed)},
            **{name: str(value) for name, value in grid["parameters"].items()},
            **{name: str(value) for name, value in (grid["cells"][cell] or {}).items()},
        }
        if "revision" in grid:
            self.names["checkout"] = str(checkout_folder(grid, work))
        self.stages: dict[str, Job] = {}  # in an order in which each finds what it needs
        self.rows = []
        for spec in grid["rows"]:
            commands = [spec["command"]] if "command" in spec else []
            job = self._job("rows", cell.replace(" ", "_"), commands)
            fill = lambda text, job=job: self.expand(text).replace("$out", str(job.folder))
            files = spec.get("json", [])
            files = [fill(file) for file in ([files] if isinstance(files, str) else files)]
            values = {name: fill(text) for name, text in spec.get("values", {}).items()}
            self.rows.append((job, files, spec.get("each"), values))
        jobs = [*self.stages.values(), *(job for job, *_ in self.rows)]
        settings = [grid["columns"], grid["from"], sorted(self.names.items())]
        self.digest = _digest([job.commands for job in jobs], settings)

    def __getitem__(self, name: str) -> str:
        if name == "out":
            return "$out"
        if name in self.names:
            return self.expand(self.names[name])
        for kind in ("data", "stages"):
            if name in self.grid[kind]:
                if name not in self.stages:
                    commands = self.grid[kind][name]
                    commands = [commands] if isinstance(commands, str) else commands
                    self.stages[name] = self._job(kind, name, commands)
                return str(self.stages[name].folder)
        raise ValueError(f"{self.grid['name']}: `${name}` names no parameter and no stage.")

    def expand(self, text: object) -> str:
        return string.Template(str(text)).substitute(self)  # type: ignore[arg-type]

    def _job(self, kind: str, name: str, commands: Sequence[str]) -> Job:
        expanded = [" ".join(self.expand(command).split()) for command in commands]
        folder = self.work / kind / f"{name}_{_digest(expanded)}"
        return Job(folder, [text.replace("$out", str(folder)) for text in expanded])


def _digest(*content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def checkout_folder(grid: Mapping[str, Any], work: Path) -> Path:
    return work / f"effasr_{grid['revision']}"


def check_out(revision: str, folder: Path) -> None:
    """Clone the repository at a revision, if the folder is not there."""

    def git(*arguments: str, root: Path = ROOT) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"revision {revision} of this repository must be there to be run, but git says: "
                f"{done.stderr.strip()}. In a shallow clone run `git fetch --unshallow`."
            )
        return done.stdout.strip()

    commit = git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    if folder.is_dir():
        return
    partial = folder.with_name(f"{folder.name}_partial")
    shutil.rmtree(partial, ignore_errors=True)
    git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(partial))
    git("checkout", "--quiet", commit, root=partial)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=partial, check=True, stdout=subprocess.DEVNULL)
    partial.rename(folder)


def run(plan: Plan, table: Path | None) -> None:
    sources = ROOT
    if "revision" in plan.grid:
        sources = checkout_folder(plan.grid, plan.work)
        check_out(str(plan.grid["revision"]), sources)
    for job in plan.stages.values():
        marker = job.folder / "stage.json"
        if not marker.is_file():
            # An interrupted stage begins anew: its processor time would be missing.
            shutil.rmtree(job.folder, ignore_errors=True)
            costs = [_call(command, job.folder, sources)[1:] for command in job.commands]
            spent = {"cpu_s": sum(x for x, _ in costs), "peak_gb": max(x for _, x in costs)}
            marker.write_text(json.dumps({"commands": job.commands, **spent}), encoding="utf-8")
    rows = []
    for job, files, each, values in plan.rows:
        printed = "".join(_call(command, job.folder, sources)[0] for command in job.commands)
        texts = [Path(file).read_text(encoding="utf-8") for file in files if file]
        if not files and printed.lstrip().startswith("{"):
            texts = [printed]
        content = {name: value for text in texts for name, value in json.loads(text).items()}
        if not plan.grid["columns"]:
            tables.show(printed or f"see {job.folder}")
        elif each is None:
            rows.append(_row(plan, values, content))
        else:
            rows += [_row(plan, values | {each: key}, figures) for key, figures in content.items()]
    # All rows of a cell at once: where there is one, there are all.
    columns = plan.grid["columns"]
    for row in rows or [{}]:
        tables.append(plan.work / "rows.csv", [*columns, CELL], row | {CELL: plan.digest})
        if table is not None and row:
            tables.append(table, columns, row)


def _call(command: str, folder: Path, sources: Path) -> tuple[str, float, float]:
    """Run a command; return its output, seconds of processor time and peak memory in GB."""
    folder.mkdir(parents=True, exist_ok=True)
    words = shlex.split(command)
    tables.show(f"$ {command}")
    if words[0] == "subset":
        subset(words[1:])
        return "", 0.0, 0.0
    programs = {"python": [sys.executable], "effasr": [sys.executable, "-m", "effasr.cli"]}
    words = [*programs.get(words[0], words[:1]), *words[1:]]
    paths = [str(sources), str(sources / "kernels"), os.environ.get("PYTHONPATH", "")]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"$ {command}\n")
        log.flush()
        process = subprocess.Popen(
            words, env=os.environ | variables, stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdout is not None
        with process.stdout:
            output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)  # its usage, with that of its children
        process.returncode = os.waitstatus_to_exitcode(status)
        log.write(output)
    if process.returncode:
        raise RuntimeError(
            f"`{command}` ended with exit code {process.returncode}: see {folder / 'log.txt'}"
        )
    # A signal ends a training early, too, and its exit code is 0.
    stopped = re.search(r"stopped at step (\d+);", (folder / "log.txt").read_text("utf-8")[-500:])
    if stopped and f"training.stop_at={stopped[1]}" not in words:
        raise RuntimeError(
            f"`{command}` was stopped at step {stopped[1]}: run the study again, which begins anew"
        )
    return output, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e9


def _row(plan: Plan, values: Mapping[str, str], content: Mapping[str, Any]) -> dict[str, Any]:
    figures, row = _figures(plan), {}
    for column in plan.grid["columns"]:
        path = plan.grid["from"].get(column, column)
        value = _at(content, path)
        if column in values:
            row[column] = values[column]
        elif value is not None:
            scale = 100 if column in plan.grid["percent"] else 1
            row[column] = float(f"{scale * value:.6g}") if isinstance(value, float) else value
        elif path in figures:
            row[column] = figures[path]
        else:
            row[column] = plan[column] if column in plan.names else ""
    return row


def _figures(plan: Plan) -> dict[str, Any]:
    import torch
    from benchmarks.harness import provenance

    last: dict[str, Any] = {}
    spent, peak, updates = [0.0], 0.0, 0
    for name, job in plan.stages.items():
        if name not in plan.grid["stages"]:
            continue
        marker = json.loads((job.folder / "stage.json").read_text(encoding="utf-8"))
        spent.append(marker["cpu_s"])
        peak = max(peak, marker["peak_gb"])
        for metrics in job.folder.glob("*/metrics.jsonl"):
            last = _trained(metrics)
            updates += last["steps"]
    costs = {"cpu_s": round(sum(spent), 1), "own_cpu_s": round(spent[-1], 1), "updates": updates}
    costs["peak_gb"] = round(peak, 2)
    return {**costs, **last, **provenance(torch.device("cpu"))}


def _trained(metrics: Path) -> dict[str, Any]:
    audio_s, step, ctc, average, baseline = 0.0, 0, None, None, None
    left: float | str = "never"
    for text in metrics.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        # A line has the mean of the steps since the line before.
        heard_s = line["audio_seconds"] * (line["step"] - step)
        audio_s += heard_s
        step, ctc, of_blind = line["step"], line.get("ctc"), line.get("ctc_of_no_audio")
        if ctc is None or of_blind is None:
            continue
        # The first line has its own loss for the average, which has the weight of MEMORY_S here:
        # that of training counts steps, which are of different length.
        baseline = baseline or ctc / of_blind
        decay = 0.0 if average is None else math.exp(-heard_s / MEMORY_S)
        average = decay * (average or 0.0) + (1 - decay) * ctc / baseline
        if left == "never" and average < LEFT:
            left = round(audio_s)
    return {"steps": step, "audio_s": round(audio_s), "ctc_loss": ctc} | {
        "ctc_of_blind": None if average is None else round(average, 3),
        "plateau_s": left,
    }


def _at(content: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(content, list):
            content = content[int(part)]
        elif isinstance(content, dict):
            content = content.get(part)
    return content


def subset(arguments: Sequence[str]) -> None:
    """Write some lines of manifests, with absolute paths: a command of grids."""
    parser = argparse.ArgumentParser(prog="subset")
    parser.add_argument("manifests", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--after-s", type=float, default=0.0, help="seconds to leave out")
    parser.add_argument("--until-s", type=float, default=float("inf"))
    parser.add_argument("--shuffle", help="seed of a random order")
    parser.add_argument("--without", nargs="*", default=[], metavar="FIELD")
    parser.add_argument("--pairs", action="store_true", help="texts that are their own sources")
    parser.add_argument("--where", nargs="*", default=[], metavar="FIELD=VALUE")
    options = parser.parse_args(arguments)
    wanted = dict(item.split("=", 1) for item in options.where)
    lines = []
    for path in options.manifests:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            line["audio_filepath"] = str((path.parent / line["audio_filepath"]).resolve())
            if wanted.items() <= line.items():
                lines.append(line)
    if options.shuffle is not None:
        seed = options.shuffle
        random.Random(int(seed) if seed.isdigit() else seed).shuffle(lines)
    begin, chosen = 0.0, []
    for line in lines:
        if options.after_s <= begin < options.until_s:
            chosen.append({key: x for key, x in line.items() if key not in options.without})
            if options.pairs:
                chosen[-1] |= {"source_text": line["text"], "source_lang": line["lang"]}
        begin += line["duration"]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in chosen)
    options.output.write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grid", metavar="GRID")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    parser.add_argument("--only", nargs="+", metavar="CELL")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N")
    parser.add_argument("--csv", type=Path, help="a table to which new rows are added, too")
    parser.add_argument("--work", type=Path, help="default: runs/studies/GRID")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    grid = load(options.grid)
    for text in options.set:
        name, equals, value = text.partition("=")
        if not equals or name not in grid["parameters"]:
            names = ", ".join(grid["parameters"]) or "none"
            raise ValueError(f"`--set` must be NAME=VALUE with NAME of {names}, but is {text}.")
        grid["parameters"][name] = value
    if unknown := set(options.only or ()) - set(grid["cells"]):
        raise ValueError(
            f"`--only` must name cells of {', '.join(grid['cells'])}, but one is {min(unknown)}."
        )
    work = (options.work or Path("runs/studies") / grid["name"]).absolute()
    for seed in options.seeds or grid["seeds"]:
        for cell in options.only or grid["cells"]:
            plan = Plan(grid, cell, seed, work)
            if options.list:
                jobs = [*plan.stages.values(), *(job for job, *_ in plan.rows)]
                commands = [command for job in jobs for command in job.commands]
                tables.show("\n  ".join([f"{plan.label}:", *commands]))
            elif any(row[CELL] == plan.digest for row in tables.read(work / "rows.csv")):
                tables.show(f"{plan.label}: skipped, as {work / 'rows.csv'} has its rows")
            else:
                run(plan, options.csv)
                tables.show(f"{plan.label}: written to {work / 'rows.csv'}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"study: {error}")

"""A command that waits in a phase: ``PHASE FOLDER ARGUMENT...``, the last those of ``effasr``.

It makes the file ``PHASE`` in the folder when it is there. In a phase of `COMPLETED` it goes on
when a signal has come to one of the processes; in another nothing but a signal ends it.
"""

import importlib
import sys
import time
from pathlib import Path

from effasr.cli.main import main
from effasr.training.fault_tolerance.stop import StopRequest

PHASES = {
    "index": ("effasr.training.resolve", "load_corpus"),
    "calibration": ("effasr.training.calibration.calibrate", "measure"),
    "step": ("effasr.training.trainer", "train_step"),
    "validation": ("effasr.training.validation", "evaluate"),
    "checkpoint": ("effasr.training.checkpointing.run_checkpoints", "write_model"),
    "export": ("effasr.interop.huggingface.checkpoint", "export_model"),
    "evaluation": ("effasr.evaluation.evaluate", "evaluate"),
}
COMPLETED = ("step", "checkpoint")


def pause(phase: str, folder: Path) -> None:
    path, name = PHASES[phase]
    module = importlib.import_module(path)
    function, note = getattr(module, name), StopRequest.note

    def paused(*arguments, **options):
        # Not in the first step of the run.
        if phase != "step" or arguments[2] == 1:
            (folder / phase).touch()
            while not (folder / "signalled").exists():
                time.sleep(0.02)
        return function(*arguments, **options)

    def noted(request, number):
        if phase in COMPLETED:
            (folder / "signalled").touch()
        note(request, number)

    setattr(module, name, paused)
    StopRequest.note = noted


if __name__ == "__main__":
    pause(sys.argv[1], Path(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))

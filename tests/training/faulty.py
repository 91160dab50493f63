"""Runs in which something is wrong: ``python -m tests.training.faulty KIND RECIPE``."""

import os
import sys
import time

from effasr.cli.main import main
from effasr.data.index import corpus
from effasr.training import step


def slow_rank():
    """Rank 1 needs 200 ms more for every micro-batch."""
    run_micro_batch = step.run_micro_batch

    def slow(*arguments, **options):
        time.sleep(0.2)
        return run_micro_batch(*arguments, **options)

    if os.environ["RANK"] == "1":
        step.run_micro_batch = slow


def stuck_read():
    """An utterance lies on a file system that does not answer: a pipe into which nobody writes."""
    load_at = corpus.load_at

    def load(segment, speed):
        if str(segment.path).endswith("train-7.wav"):
            os.open(os.environ["EFFASR_TEST_PIPE"], os.O_RDONLY)
        return load_at(segment, speed)

    corpus.load_at = load


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    sys.exit(main(["train", sys.argv[2]]))

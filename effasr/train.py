"""Train a model: ``torchrun effasr/train.py RECIPE [path.to.field=value ...]``.

``torchrun -m effasr.train`` and ``effasr train`` are the same program.
"""

import sys

from effasr.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

"""``effasr.training.calibration.trial`` of a request in a file: FILE PARENT."""

import sys
from pathlib import Path

from effasr.training.calibration import trial

if __name__ == "__main__":
    file, parent = sys.argv[1:]
    sys.argv[1:] = [parent]
    with Path(file).open() as sys.stdin:
        code = trial.main()
    sys.exit(code)

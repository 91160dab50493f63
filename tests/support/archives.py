"""Archives that tests unpack."""

import tarfile
from pathlib import Path

# Python before 3.11.4 has no filters.
FILTER = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, **FILTER)

"""Pictures of the pages of `effasr report`, for docs/run-directory.md and docs/data.md.

    python docs/generate_pages.py [--folder FOLDER]

Looks at the run and the corpus of `make demo` in FOLDER (default: the checkout) with Chromium, at
widths of 1400 and 400 pixels, in light and in dark, and writes docs/images/page_*.webp. Needs
chromium and Pillow (``apt install chromium``, ``pip install pillow``).
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from effasr.cli.main import main as effasr

IMAGES = Path(__file__).parent / "images"
PAGES = {"run": "runs/demo", "corpus": "data/demo/train.jsonl"}
HEIGHTS = {1400: 2400, 400: 2000}  # by width
SCHEMES = ("dark", "light")  # by Chromium's number
MOST_BYTES = 150_000


def main() -> int:
    """Write the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=IMAGES.parents[1])
    folder = parser.parse_args().folder
    with TemporaryDirectory() as temporary:
        for name, source in PAGES.items():
            page = Path(temporary) / f"{name}.html"
            if effasr(["report", str(folder / source), str(page)]):
                raise RuntimeError(f"no page of {source}: run `make demo` in {folder} before")
            for width, height in HEIGHTS.items():
                for number, scheme in enumerate(SCHEMES):
                    screen = page.with_suffix(".png")
                    command = [
                        *("chromium", "--headless=new", "--no-sandbox", "--hide-scrollbars"),
                        *(f"--window-size={width},{height}", f"--screenshot={screen}"),
                        *(f"--blink-settings=preferredColorScheme={number}", page.as_uri()),
                    ]
                    subprocess.run(command, check=True, capture_output=True, timeout=120)
                    path = IMAGES / f"page_{name}_{width}_{scheme}.webp"
                    Image.open(screen).save(path, quality=70, method=6)
                    if path.stat().st_size > MOST_BYTES:
                        raise RuntimeError(f"{path} must have at most {MOST_BYTES} bytes")
                    sys.stdout.write(f"{path.name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

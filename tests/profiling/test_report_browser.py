"""The page in a real browser, where there is one: it fits a laptop screen, and uses both themes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import report

from tests.profiling.test_report import export

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")


def browse(tmp_path: Path, *options: str) -> str:
    command = [
        *(str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,900", *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.fixture
def page(tmp_path: Path) -> Path:
    report.make([[export(tmp_path / "rank0.sqlite")]], tmp_path / "out")
    return tmp_path / "out" / "report.html"


def test_the_page_fits_a_laptop_and_its_script_runs(page: Path, tmp_path: Path) -> None:
    probe = (
        "<script>document.querySelector('#kernels th button').click();"
        "document.title = `${document.documentElement.scrollWidth} of ${innerWidth}, "
        "${document.querySelectorAll('[aria-sort]').length} sorted`</script>"
    )
    page.write_text(page.read_text().replace("</body>", probe + "</body>"))
    title = re.search(
        r"<title>(\d+) of (\d+), 1 sorted</title>", browse(tmp_path, "--dump-dom", page.as_uri())
    )
    assert title
    assert int(title[1]) <= int(title[2])


def test_light_and_dark_differ(page: Path, tmp_path: Path) -> None:
    pictures = []
    for theme in (0, 1):
        picture = tmp_path / f"{theme}.png"
        browse(
            tmp_path,
            f"--screenshot={picture}",
            f"--blink-settings=preferredColorScheme={theme}",
            page.as_uri(),
        )
        pictures.append(picture.read_bytes())
    assert pictures[0][:8] == b"\x89PNG\r\n\x1a\n"
    assert pictures[0] != pictures[1]

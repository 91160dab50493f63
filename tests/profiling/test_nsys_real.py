"""Where Nsight Systems is installed: a script with our ranges, recorded, exported and read."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from analysis import nsys

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, time
from effasr import ranges
ranges.enable("nvtx", tool_version=(int(sys.argv[1]), int(sys.argv[2])))
for number in range(3):
    with ranges.range("step", number), ranges.range("forward"):
        time.sleep(0.01)
"""


def test_our_ranges_survive_the_trip_through_the_profiler(tmp_path: Path) -> None:
    tool = shutil.which("nsys")
    if tool is None:
        pytest.skip("nsys is not installed")
    pytest.importorskip("nvtx")
    message = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    year, number = re.search(r"(20\d\d)\.(\d+)", message).groups()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    report = tmp_path / "report"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    recorded = subprocess.run(
        [
            *(tool, "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none"),
            *("--force-overwrite=true", f"--output={report}"),
            *(sys.executable, str(script), year, number),
        ],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if "loses every range" in recorded.stdout + recorded.stderr:
        pytest.skip("this nvtx and this nsys lose every range together: `enable` has refused them")
    export = [tool, "export", "--type=sqlite", f"--output={report}.sqlite", f"{report}.nsys-rep"]
    exported = subprocess.run(export, capture_output=True, text=True, timeout=120, check=False)
    if not report.with_suffix(".sqlite").is_file():
        pytest.skip(f"nsys exports nothing here: {(exported.stderr or recorded.stdout)[-300:]}")
    table = nsys.read(report.with_suffix(".sqlite"))
    result = [(table.names[row["name"]], int(row["payload"])) for row in table.ranges]
    assert [payload for name, payload in result if name == "step"] == [0, 1, 2]
    assert [name for name, _ in result].count("forward") == 3
    for row in table.ranges:
        assert 0.009e9 < row["end"] - row["start"] < 5e9

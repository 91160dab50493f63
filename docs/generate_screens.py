"""Pictures of commands in terminals of 80 and 120 columns, for docs/terminal.md.

    python docs/generate_screens.py [NAME ...] [--folder FOLDER]

Runs ``make demo`` and others that need it in FOLDER (default: the checkout), each in a terminal of
its own, and writes docs/images/NAME_COLUMNS.svg with the last screens of what a user
then sees. Needs pyte (``pip install pyte``).
"""

import argparse
import fcntl
import io
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pyte
from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
COLUMNS = (80, 120)
LINES = 48  # of the screen; a longer output shows its end
COMMANDS: dict[str, str] = {
    "demo": "make demo",
    "train": "effasr train demo name=screens training.stop_at=300",
    "evaluate": "effasr evaluate --run runs/demo --manifest data/demo/test.jsonl",
    "transcribe": "effasr transcribe --run runs/demo data/demo/test/audio/en-04200.wav",
    "doctor": "effasr doctor",
}
# rich's own, without the font that a browser would fetch from elsewhere.
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pictures of the named commands, or of all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(COMMANDS))
    parser.add_argument("--folder", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - COMMANDS.keys()):
        parser.error(f"`NAME` must be of {', '.join(COMMANDS)}, but is {', '.join(unknown)}.")
    IMAGES.mkdir(exist_ok=True)
    for name in options.names or COMMANDS:
        for columns in COLUMNS:
            shutil.rmtree(options.folder / "runs" / "screens", ignore_errors=True)
            screen = run(COMMANDS[name], options.folder, columns)
            path = IMAGES / f"{name}_{columns}.svg"
            path.write_text(picture(screen, COMMANDS[name], columns))
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    return 0


def run(command: str, folder: Path, columns: int) -> pyte.Screen:
    """Return the screen of a terminal after a command, which must succeed."""
    screen = pyte.Screen(columns, LINES)
    stream = pyte.ByteStream(screen)
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.Popen(
        command.split(), cwd=folder, stdin=follower, stdout=follower, stderr=follower,
        env={**os.environ, "PATH": places, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(follower)
    while chunk := _read(leader):
        stream.feed(chunk)
    os.close(leader)
    if process.wait():
        raise RuntimeError(f"`{command}` in {folder} ended with {process.returncode}.")
    return screen


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 1 << 16)
    except OSError:  # Linux reports the end of the terminal's last program so
        return b""


def picture(screen: pyte.Screen, command: str, columns: int) -> str:
    """Return the lines of a screen as SVG."""
    console = Console(width=columns, record=True, file=io.StringIO(), color_system="truecolor")
    lines = [_line(screen.buffer[row], columns) for row in range(LINES)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    for line in lines:
        console.print(line, no_wrap=True, crop=True)
    name = command.split()[1]
    return console.export_svg(title=f"$ {command}", code_format=SVG, unique_id=f"{name}-{columns}")


def _line(cells: Mapping[int, Char], columns: int) -> Text:
    text = Text()
    row = [cells[column] for column in range(columns)]
    for (color, bold), same in groupby(row, key=lambda cell: (cell.fg, cell.bold)):
        style = Style(color=_color(color), bold=bold)
        text.append("".join(cell.data for cell in same), style)
    text.rstrip()
    return text


def _color(name: str) -> str | None:
    if name == "default":
        return None
    is_hex = len(name) == 6 and all(digit in "0123456789abcdef" for digit in name)
    return f"#{name}" if is_hex else {"brown": "yellow"}.get(name, name)


if __name__ == "__main__":
    raise SystemExit(main())

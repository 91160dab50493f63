"""docs/data-path.md names functions that exist, and not too many of them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS = re.findall(
    r"^\| `([\w/]+\.py):([\w.]+)` \|", (ROOT / "docs/data-path.md").read_text(), re.M
)


def functions(path):
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = (item for item in node.body if isinstance(item, ast.FunctionDef))
            names |= {f"{node.name}.{member.name}" for member in members}
    return names


def test_every_function_exists():
    missing = [
        f"{file}:{name}" for file, name in STEPS if name not in functions(ROOT / "effasr" / file)
    ]
    assert not missing


def test_the_path_is_short():
    assert 40 < len(STEPS) <= 45
    assert len({file for file, _ in STEPS}) <= 30

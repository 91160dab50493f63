"""Writes docs/api: a page for each operation of effasr_kernels, from its docstring and an example.

    python docs/generate_api.py [--check]

The example of an operation is docs/examples/OPERATION.py. --check writes nothing, and exits with 1
if a page is not up to date.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "kernels")]

import effasr_kernels  # noqa: E402 (found on the path above)

API = ROOT / "docs/api"
EXAMPLES = ROOT / "docs/examples"
TYPES = ("PackedLayout", "PackedSequence", "Rotary", "RelativeBias", "Context", "Backend")
"""Classes that operations take, on the page of contents."""
HELPERS = ("pack", "allow_reference_on_gpu", "BackendUnavailable", "ReferenceOnGPUWarning")
"""What else the package exports for users, on the page of contents."""
_SECTIONS = ("Args", "Attributes", "Returns", "Raises", "References")
_ENTRY = re.compile(r"(\w+): (.*)")


def markdown(docstring: str) -> str:
    """Convert a docstring: sections become headings, entries lists, and formulas math blocks."""
    sections = re.split(rf"^({'|'.join(_SECTIONS)}):\n", docstring, flags=re.M)
    parts = [_prose(sections[0])]
    for title, text in zip(sections[1::2], sections[2::2], strict=True):
        name = "Arguments" if title == "Args" else title
        text = inspect.cleandoc(text)
        is_list = title in ("Args", "Attributes", "Raises")
        parts.append(f"### {name}\n\n{_entries(text) if is_list else _prose(text)}")
    return "\n\n".join(parts)


def _prose(text: str) -> str:
    """Paragraphs, each on one line, and formulas."""
    parts = []
    for block in re.split(r"\n\s*\n", text.strip()):
        before, mark, formula = block.partition(".. math::")
        if before.strip():
            parts.append(_inline(" ".join(before.split())))
        if mark:
            lines = inspect.cleandoc(formula).splitlines()
            body = "\n".join(line.strip() for line in lines)
            if "&" in body:
                body = f"\\begin{{aligned}}\n{body}\n\\end{{aligned}}"
            parts.append(f"```math\n{body}\n```")
    return "\n\n".join(parts)


def _entries(text: str) -> str:
    """A list of the entries ``name: text`` of a section."""
    found: list[str] = []
    for line in text.splitlines():
        if (match := _ENTRY.fullmatch(line)) and not line.startswith(" "):
            found.append(f"- **`{match[1]}`**: {match[2]}")
        else:
            found[-1] += f" {line.strip()}"
    return "\n".join(map(_inline, found))


def _inline(text: str) -> str:
    """Code as Markdown has it, and addresses as links."""
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    return re.sub(r"(https?://\S+?)(?=[,.;)]*(\s|$))", r"<\1>", text)


def signature(function: object) -> str:
    """The signature, an argument a line."""
    found = inspect.signature(function)  # type: ignore[arg-type]
    lines, keyword = [], False
    for name, parameter in found.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            keyword = True
            lines.append("    *,")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"    {name}: {_annotation(parameter.annotation)}{default},")
    body = "\n".join(lines)
    return (
        f"{getattr(function, '__name__', '')}(\n{body}\n) -> {_annotation(found.return_annotation)}"
    )


def _annotation(annotation: object) -> str:
    """An annotation without the modules of its classes."""
    if annotation is None or isinstance(annotation, type):
        return str(getattr(annotation, "__name__", None))
    return re.sub(r"[\w.]+\.(\w+)", r"\1", str(annotation))


def page(name: str) -> str:
    """The page of an operation."""
    function = getattr(effasr_kernels, name)
    backends = ", ".join(f"`{one.value}`" for one in effasr_kernels.OPERATIONS[name].backends)
    example = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").rstrip()
    return (
        f"<!-- Written by docs/generate_api.py. -->\n\n# {name}\n\n"
        f"```python\n{signature(function)}\n```\n\n{markdown(inspect.getdoc(function) or '')}\n\n"
        f"### Backends\n\n{backends}, in order of preference. A backend may support some calls "
        f"alone: `effasr doctor` shows why.\n\n"
        f"### Example\n\n```python\n{example}\n```\n"
    )


def contents() -> str:
    """The page of contents: the operations, and the classes they take."""
    lines = [
        *("<!-- Written by docs/generate_api.py. -->", "", "# API of effasr_kernels", ""),
        "After this page you can call every operation: each page has the formula, shapes, dtypes, "
        "errors and an example that runs on a CPU. All are imported from `effasr_kernels`.",
        *("", "| operation | what it does |", "|---|---|"),
    ]
    for name in effasr_kernels.OPERATIONS:
        lines.append(f"| [`{name}`]({name}.md) | {_summary(getattr(effasr_kernels, name))} |")
    for name in TYPES:
        docstring = inspect.getdoc(getattr(effasr_kernels, name)) or ""
        lines += ["", f"## {name}", "", markdown(docstring)]
        if listed := list(methods(getattr(effasr_kernels, name))):
            lines += ["", "### Methods", "", *listed]
    lines += ["", "## Others", ""]
    for name in HELPERS:
        found = getattr(effasr_kernels, name)
        arguments = "" if inspect.isclass(found) else _arguments(found)
        lines.append(f"- **`{name}{arguments}`**: {_summary(found)}")
    return "\n".join(lines) + "\n"


def methods(cls: type) -> Iterator[str]:
    """An entry for each public method and property of a class, in the order of its source."""
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"- **`{name}`**: {_summary(member)}"
        elif inspect.isfunction(member) or isinstance(member, classmethod):
            bound = getattr(cls, name)
            yield f"- **`{name}{_arguments(bound)}`**: {_summary(bound)}"


def _arguments(function: object) -> str:
    """The arguments of a function or method in one line, without annotations and ``self``."""
    found = inspect.signature(function)  # type: ignore[arg-type]
    shown = [
        parameter.replace(annotation=parameter.empty)
        for name, parameter in found.parameters.items()
        if name != "self"
    ]
    return str(inspect.Signature(shown))


def _summary(documented: object) -> str:
    """The first paragraph of a docstring, on one line."""
    first = (inspect.getdoc(documented) or "").split("\n\n")[0]
    return _inline(" ".join(first.split()))


def pages() -> Iterator[tuple[Path, str]]:
    """Every page with its text."""
    yield API / "README.md", contents()
    for name in effasr_kernels.OPERATIONS:
        yield API / f"{name}.md", page(name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or check them; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only report outdated pages")
    options = parser.parse_args(arguments)
    found = dict(pages())
    changed = [
        path
        for path, text in found.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    superfluous = [path for path in API.glob("*.md") if path not in found]
    if not options.check:
        API.mkdir(exist_ok=True)
        for path in changed:
            path.write_text(found[path], encoding="utf-8")
        for path in superfluous:
            path.unlink()
    for path in [*changed, *superfluous]:
        sys.stdout.write(
            f"{path.relative_to(ROOT)}: {'outdated' if options.check else 'written'}\n"
        )
    return 1 if options.check and (changed or superfluous) else 0


if __name__ == "__main__":
    sys.exit(main())

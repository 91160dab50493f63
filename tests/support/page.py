"""Pages of HTML, as tests read them."""

import re
from html.parser import HTMLParser
from pathlib import Path

_VOID = {"meta", "br", "img", "input", "link", "hr"}
_REFERENCES = {"href", "src", "action", "data"}


class Page(HTMLParser):
    """The texts of a page by section, and what its elements refer to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.sections: dict[str, str] = {"": ""}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.identifiers: list[str] = []
        self._section, self._open = "", list[str]()
        self.feed(self.html)
        self.close()
        assert not self._open
        assert not re.search(r"https?:|@import|url\(|onerror=\"", self.html)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag not in _VOID:
            self._open.append(tag)
        self.links += [value for name, value in attrs if name in _REFERENCES and value]
        self.identifiers += [value for name, value in attrs if name == "id" and value]
        if tag == "section":
            self._section = values.get("id") or ""
            self.sections.setdefault(self._section, "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.sections[self._section] += data
            self.words.append(data)

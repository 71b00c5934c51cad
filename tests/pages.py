"""What a report page must satisfy, without a browser."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Collects ids, links and the shape of every figure, and refuses wrong nesting."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.figures: dict[str, int] = {}  # id -> marks drawn inside its svg

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if "figure" not in self.open and found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "figure":
            self.figures[str(found["id"])] = 0
            self.ids.append(str(found["id"]))
        if "svg" in self.open and tag in ("path", "rect", "use", "text"):
            self.figures[list(self.figures)[-1]] += 1
        self.links += [
            str(found[key]) for key in ("href", "src") if found.get(key) and "svg" not in self.open
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without its start"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()


def check_page(path: Path) -> set[str]:
    """The browser-free test of a page; returns the ids of its figures."""
    text = path.read_text()
    found = Page()
    found.feed(text)
    assert not found.open
    assert len(found.ids) == len(set(found.ids))
    for link in found.links:
        if link.startswith("#"):
            assert link[1:] in found.ids, link
        else:
            head, _, data = link.partition(",")
            assert head == "data:application/json;base64"
            json.loads(base64.b64decode(data))
    assert not re.search(r"""(href|src)=["']https?:|url\(\s*["']?https?:|@import|<script""", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert all(n > 10 for n in found.figures.values()), found.figures
    for name in found.figures:
        for suffix in (".png", ".svg", ".json"):
            assert (path.with_suffix("") / f"{name}{suffix}").stat().st_size > 0
    return set(found.figures)

"""An HTML page as a parser sees it: its elements, their text, whether it is complete, and what it would load."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Parses a page; fails where a closed element was not open."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text_parts: list[tuple[tuple[str, ...], str]] = []
        self._open: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"elements left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        assert len(attributes) == len(attrs), f"duplicate attribute on {tag}"
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self._open.append((tag, attributes))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self._open.pop()
        assert opened == tag, f"<{opened}> closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        places = tuple(attributes.get("id", tag) for tag, attributes in self._open)
        self.text_parts.append((places, data))

    def text(self, place: str = "html") -> str:
        """Returns the text inside the element with this id or tag, without scripts and styles."""
        parts = [
            t for places, t in self.text_parts if place in places and not {"script", "style"} & {*places[-1:]}
        ]
        return " ".join(" ".join(parts).split())

    def all(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        """Returns the attributes of each element of a tag with these values; `class_` for class."""
        pairs = {name.rstrip("_"): value for name, value in wanted.items()}
        return [a for t, a in self.elements if t == tag and all(a.get(k) == v for k, v in pairs.items())]

    def data(self, place: str) -> Any:
        """Returns the JSON inside the element with this id."""
        (text,) = (t for places, t in self.text_parts if place in places and places[-1] == "script")
        return json.loads(text)

    def whole(self) -> None:
        """Checks that ids are unique, internal links have a target, and nothing would be loaded."""
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        for tag, attributes in self.elements:
            assert tag not in ("img", "iframe", "object", "embed", "base", "form", "audio", "video"), tag
            assert not [name for name in attributes if name.startswith("on")], attributes
            assert "src" not in attributes and "url(" not in attributes.get("style", "")
            link = attributes.get("href", "data:,")
            assert link == "data:," or link[1:] in ids, link

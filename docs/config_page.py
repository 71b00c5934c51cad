"""config.md: every key with its legal values, default and meaning (`make docs` writes it)."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from pathlib import Path
from typing import Any, Literal

from twistlm import config

TITLE = f"""# Config keys

Made from `twistlm/config.py` by `make docs`; a test holds it up to date. Give any key on the
command line as `section.key=value` (a value is TOML, a bare word a string), or in a TOML file as a
table of its section. What is not given keeps its default.
Presets: {", ".join(f"`{name}`" for name in config.preset_names())}
([how to train](train.md)).
"""


def page() -> str:
    """The whole page as Markdown, one table for each section."""
    parts = [TITLE]
    for name, section in typing.get_type_hints(config.Config).items():
        rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
        hints, meanings = typing.get_type_hints(section), field_docs(section)
        for field in dataclasses.fields(section):
            default = getattr(section(), field.name)
            cells = (
                f"`{name}.{field.name}`",
                f"{legal(hints[field.name])} {field.metadata.get('range', '')}".strip(),
                f"`{json.dumps(default)}`",
                meanings[field.name],
            )
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append(f"## {name}\n\n{inspect.getdoc(section)}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def field_docs(section: type) -> dict[str, str]:
    """The string below each field of a dataclass, on one line."""
    source, one = inspect.getsource(section), r'^    (\w+): [^\n]+\n    """(.*?)"""'
    found = re.findall(one, source, re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def legal(hint: Any) -> str:
    """An annotation in words: its literals, or the kind of value."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"{legal(args[0])}, or a list of them"
    if origin is tuple:
        return f"a list of {len(args)}: {', '.join(map(legal, args))}"
    words = {str: "text", int: "integer", float: "number", bool: "`true`, `false`", dict: "a table"}
    return words[origin or hint]


if __name__ == "__main__":
    Path(__file__).with_name("config.md").write_text(page())

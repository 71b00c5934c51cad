"""The README.md of a ticket folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..parent import Parent


def save(parent: Parent, ticket: PreTrainedModel, record: dict[str, Any], folder: Path) -> None:
    (folder / "README.md").write_text(f"# A ticket of {parent.source}\n")

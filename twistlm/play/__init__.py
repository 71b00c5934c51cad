"""`twistlm play`: a local page where a parent and its tickets write side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PICKS = ("nested", "random", "best of 4")


@dataclass(frozen=True)
class TicketChoice:
    """Which ticket: its place among the sizes, how its blocks are picked, the seed of a draw."""

    size: int  # 1 is the smallest
    pick: str = PICKS[0]
    seed: int = 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that another process may be writing."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line.strip()]

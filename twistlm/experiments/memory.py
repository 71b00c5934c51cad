"""Asymptotic memory: what a subnet with half the blocks keeps of GPT-2 small, medium, large and XL."""

from __future__ import annotations

from typing import Any

from .. import config
from ..plan import make
from .lab import Lab, Point


def points(lab: Lab) -> list[Point]:
    """Counted from shapes: the same at every scale."""
    about = {"experiment": "memory", "scale": lab.name, "share": "6/12"}

    def measure() -> dict[str, Any]:
        return {"half": make(config.load("paper")).half}

    return [Point(about, measure)]

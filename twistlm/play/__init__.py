"""`twistlm play`: a local page where a parent and its tickets write side by side."""

from dataclasses import dataclass

PICKS = {"nested": "nested", "random": "random", "best of 4": "best-of:4"}  # label -> --pick


@dataclass(frozen=True)
class TicketChoice:
    """Which ticket: its place among the sizes, how its blocks are picked, the seed of a draw."""

    size: int  # 1 is the smallest
    pick: str = "nested"  # one of `PICKS`
    seed: int = 0

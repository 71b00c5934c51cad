"""What carries the rounds of a run. An engine is one file that the loop does not know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...transport.events import Events
from ...transport.traffic import Traffic
from ..aggregator import Stats
from ..progress import Progress


@dataclass(frozen=True)
class Outcome:
    """A committed round: its losses, its bytes, and where the run stands now."""

    stats: Stats
    traffic: Traffic
    progress: Progress


class Engine(Protocol):
    """Carries one round after the other; lives as long as the run."""

    @property
    def is_whole(self) -> bool:
        """Whether the central tensors are those of the last round without `collect_`."""

    @property
    def events(self) -> Events | None:
        """Workers that come and go, for the live view."""

    def round(self, progress: Progress) -> Outcome:
        """One round from `progress`: the central tensors change, or `Ended` is raised and they do not."""

    def collect_(self) -> None:
        """Bring the central tensors up to date; called on all ranks, before they are read."""

    @property
    def stops(self) -> bool:
        """Whether a signal asks the run to end after this round; all ranks say the same."""

    def close(self, crashed: bool) -> None:
        """Let go of what the engine opened; a run that crashed may leave what `--resume` finds again."""

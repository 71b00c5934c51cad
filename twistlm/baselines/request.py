"""What `twistlm lab prune` is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from . import NAMES, STRUCTURED


@dataclass(frozen=True, kw_only=True)
class PruneRequest:
    """How a parent is pruned: the method, how much goes, and the text that it goes by."""

    method: str  # one of `baselines.NAMES`
    sparsity: str | None = None  # one of these three says how much
    ratio: str | None = None
    nm: str | None = None
    data: str | None = None  # calibration text; None: the training tokens of the parent's run
    n: int = 128  # calibration sequences
    seed: int = 0
    repair: str | None = None  # of whole blocks: one of `baselines.REPAIRS`

    def __post_init__(self) -> None:
        if self.method not in NAMES:
            raise ValueError(f"--method {self.method!r}: use one of {', '.join(NAMES)}")
        if self.importance is None:
            if self.repair is not None:
                raise ValueError(
                    f"--repair {self.repair} is for whole blocks: --method {self.method} "
                    "removes none"
                )
        elif self.ratio is None or self.sparsity or self.nm:
            raise ValueError(
                f"--method {self.method} keeps whole blocks: give --ratio, and only that"
            )

    @property
    def importance(self) -> str | None:
        """What whole blocks are scored by; None where single weights go."""
        is_block = self.method.startswith(STRUCTURED)
        return self.method.removeprefix(STRUCTURED) if is_block else None

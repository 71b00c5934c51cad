"""Pruning after training: SparseGPT, Wanda, Z-Pruner, magnitude, and whole blocks by score."""

from dataclasses import dataclass

from ..fields import Checked, option, seed_of, words
from ..tickets import IMPORTANCES

SINGLE_WEIGHTS = ("sparsegpt", "wanda", "zpruner", "magnitude")
STRUCTURED = "block:"  # before the name of an importance: whole blocks go
WHOLE_BLOCKS = tuple(STRUCTURED + name for name in IMPORTANCES)
NAMES = (*SINGLE_WEIGHTS, *WHOLE_BLOCKS)  # of `prune --method`
# of `compare --methods`: every parent's random tickets are in its table anyway
COMPARED = tuple(name for name in NAMES if name != f"{STRUCTURED}random")


@dataclass(frozen=True, kw_only=True)
class PruneRequest(Checked):
    """How a parent is pruned: the method, how much goes, and the text that it goes by."""

    method: str = option(
        f"{words(SINGLE_WEIGHTS)} (single weights); {words(WHOLE_BLOCKS)} (whole blocks).",
        choices=NAMES,
    )
    ratio: str = option(
        "Share of blocks, or of single weights in every matrix, that stays: 4/12 or "
        "attn=2/3,ffn=6/12.",
    )
    data: str | None = option("Token file to calibrate on; default: the run's data.train.", None)
    n: int = option("Calibration sequences.", 128, "--n", least=1)
    seed: int = seed_of("the sequences and of block:random")

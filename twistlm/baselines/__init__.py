"""The rivals: SparseGPT, Wanda, Z-Pruner, magnitude and blocks by score, on one walk."""

from __future__ import annotations

from ..tickets import IMPORTANCES

SINGLE_WEIGHTS = (
    "sparsegpt", "wanda", "zpruner", "zpruner-datafree", "zpruner-rows", "zpruner-repair", "magnitude"
)  # fmt: skip
STRUCTURED = "block:"  # before the name of an importance: whole blocks go
WHOLE_BLOCKS = tuple(STRUCTURED + name for name in IMPORTANCES)
NAMES = (*SINGLE_WEIGHTS, *WHOLE_BLOCKS)  # of `prune --method`
# of `compare --methods`: every parent's random tickets are in its table anyway
COMPARED = tuple(name for name in NAMES if name != f"{STRUCTURED}random")
REPAIRS = ("bias", "rescale", "lstsq")

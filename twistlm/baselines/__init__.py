"""Pruning after training: SparseGPT, Wanda, Z-Pruner, magnitude, and whole blocks by score."""

from __future__ import annotations

from ..tickets import IMPORTANCES

# Z-Pruner's variants: without data, compared within rows, with SparseGPT's update
ZPRUNERS = ("zpruner-datafree", "zpruner-rows", "zpruner-repair")
SINGLE_WEIGHTS = ("sparsegpt", "wanda", "zpruner", "magnitude", *ZPRUNERS)
STRUCTURED = "block:"  # before the name of an importance: whole blocks go
WHOLE_BLOCKS = tuple(STRUCTURED + name for name in IMPORTANCES)
NAMES = (*SINGLE_WEIGHTS, *WHOLE_BLOCKS)  # of `prune --method`
# of `compare --methods`: every parent's random tickets are in its table anyway
COMPARED = tuple(name for name in NAMES if name != f"{STRUCTURED}random")
REPAIRS = ("bias", "rescale", "lstsq")

"""The names of every way to prune and to repair: for help texts, which must not import torch."""

from ..tickets.names import IMPORTANCES

SINGLE_WEIGHTS = ("sparsegpt", "wanda", "zpruner", "zpruner-datafree", "magnitude")
STRUCTURED = "block:"  # before the name of an importance: whole blocks go
WHOLE_BLOCKS = tuple(STRUCTURED + name for name in IMPORTANCES)
NAMES = (*SINGLE_WEIGHTS, *WHOLE_BLOCKS)  # of `prune --method`
REPAIRS = ("bias", "rescale", "lstsq")

"""The words that choose a ticket, as they are typed: for help texts, which must not import torch."""

IMPORTANCES = ("fisher", "mask-fisher", "taylor", "magnitude", "random")  # `importance.METHODS`
NEEDS_TEXT = (
    "fisher",
    "mask-fisher",
    "taylor",
)  # importances that are measured on calibration text
PICKS = ("random", "best-of:N", "importance", "importance:METHOD")
DTYPES = ("float32", "bfloat16", "float16")  # of a ticket's weights

"""(6) Deployment: choose, extract, prove, write and load a ticket."""

IMPORTANCES = ("fisher", "mask-fisher", "taylor", "magnitude", "random")  # see `importance.score`
NEEDS_TEXT = ("fisher", "mask-fisher", "taylor", "neurons")  # measured on calibration text
PICKS = ("nested", "random", "best-of:N", "neurons", "importance", "importance:METHOD")
SPENDS = ("measured", "even")  # where the blocks of a budget go
DTYPES = ("float32", "bfloat16", "float16")  # of a ticket's weights

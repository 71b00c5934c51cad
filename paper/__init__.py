"""The research: the paper's experiments, our recipe, the measured points and their tables.

experiments.py       what is measured: an experiment is a list of points
scales.py            the data: sizes of everything, recipes and ways to train
lab.py               trains parents, measures points, goes on where it stopped
tables.py, report.py points as tables and figures
points/              what was measured, a line of JSON for each
"""

NAMES = {  # experiment -> what it measures
    "parents": "every trained model that the others share: tokens, seconds, bytes, loss",
    "recipe": "random and nested tickets of every way to train, over seeds and rates",
    "table1": "perplexity by setting and size: TwIST, controls and post-training pruners (Table 1)",
    "stability": "the distribution of random subnets at 4, 6, 8 and 10 of 12 blocks",
    "robustness": "trained on X blocks, evaluated on Y",
    "table2": "memory, bytes and wall clock, measured and by the paper's formula (Table 2)",
    "latency": "ms per step against the number of blocks, beside the ideal by FLOPs",
    "shift": "the norm of a layer's output with K of N blocks, against sqrt(K/N)",
    "nodeloss": "perplexity when nodes of a model-parallel deployment die",
}

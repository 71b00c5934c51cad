"""The paper's tables and figures, one file each: a grid of points, and how they are shown.

Every module has `points(lab)`, the list of what is measured, and `section(points)`, which turns the
finished ones into a table, figures and a reading.
"""

NAMES = {  # experiment -> what it measures
    "parents": "every trained model that the others share: tokens, seconds, bytes, loss",
    "recipe": "random and nested tickets of every way to train, over seeds and rates, and an ablation",
    "table1": "perplexity by setting and size: TwIST, controls and post-training pruners (Table 1)",
    "stability": "the distribution of random subnets at 4, 6, 8 and 10 of 12 blocks",
    "robustness": "trained on X blocks, evaluated on Y: heat-maps",
    "table2": "memory, bytes and wall clock, measured and by the paper's formula (Table 2)",
    "latency": "ms per step against the number of blocks, beside the ideal by FLOPs",
    "memory": "what a subnet with half the blocks keeps of GPT-2 small to XL",
    "shift": "the norm of a layer's output with K of N blocks, against sqrt(K/N) and the exact formula",
    "nodeloss": "perplexity when nodes of a model-parallel deployment die",
}

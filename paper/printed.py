"""The paper's own numbers, to stand beside ours: GPT-2 124M on WikiText-103, four P100."""

# of `TABLE1`: `twist` is trained at K, `twist-6` at 6 of 12
_METHODS = ("sparsegpt", "wanda", "zpruner", "block", "dense", "twist", "twist-6")
_TABLE1 = {
    "attn": {
        8: (16.14, 16.42, 16.27, 21.90, 22.91, 17.35, 17.29),
        6: (16.81, 19.33, 17.75, 30.20, 32.56, 17.74, 17.74),
        4: (20.06, 86.09, 27.42, 78.26, 61.12, 18.25, 18.88),
        3: (25.76, 57.72, 44.12, 133.41, 273.46, 18.49, 19.90),
    },
    "both": {
        8: (16.60, 18.30, 17.27, 66.44, 54.19, 19.67, 20.02),
        6: (19.11, 36.19, 24.85, 247.01, 176.71, 21.32, 21.32),
        4: (31.64, 173.66, 109.11, 617.98, 974.31, 23.14, 25.53),
        3: (58.16, 284.59, 238.09, 1156.67, 2587.42, 24.86, 24.32),
    },
    "ffn": {
        8: (16.41, 17.55, 16.85, 33.83, 31.60, 18.06, 18.48),
        6: (17.99, 24.57, 20.65, 62.93, 63.23, 18.90, 18.90),
        4: (24.00, 63.14, 41.57, 162.74, 174.95, 19.69, 21.39),
        3: (32.63, 146.65, 88.64, 298.84, 361.33, 20.51, 23.51),
    },
}
TABLE1 = {  # setting -> K of 12 -> method -> perplexity
    setting: {k: dict(zip(_METHODS, row, strict=True)) for k, row in rows.items()}
    for setting, rows in _TABLE1.items()
}

# setting -> K of 12 -> memory in GB, communication in TB, wall clock (h:mm:ss)
TABLE2 = {
    "attn": {
        10: (1.87, 44.35, "4:19:06"),
        8: (1.82, 43.20, "4:08:30"),
        6: (1.79, 42.05, "3:52:27"),
        4: (1.72, 40.90, "3:41:12"),
    },
    "both": {
        10: (1.77, 42.05, "4:14:03"),
        8: (1.64, 38.60, "3:49:50"),
        6: (1.50, 35.14, "3:25:14"),
        4: (1.34, 31.69, "3:04:39"),
        12: (1.88, 45.50, "4:35:42"),  # data parallel
    },
    "ffn": {
        10: (1.82, 43.20, "4:30:31"),
        8: (1.73, 40.90, "4:14:19"),
        6: (1.63, 38.60, "4:06:53"),
        4: (1.53, 36.29, "3:54:19"),
    },
}

# ms per batch with 4 of 12 blocks, and whole
LATENCY = {"both": 263, "attn": 317, "ffn": 334, "whole": 385}


def gpt2_params(n_layers: int, d: int, n_cut: int = 0, share: float = 1.0) -> int:
    """GPT-2 by the appendix's formulas, with `n_cut` layers that keep `share` of their blocks."""

    def layer(d_attn: int, d_ffn: int) -> int:
        norms = 2 * 2 * d
        return 4 * d_attn * d + 3 * d_attn + d + 2 * d_ffn * d + d_ffn + d + norms

    whole, cut = layer(d, 4 * d), layer(int(share * d), int(share * 4 * d))
    return (50257 + 1024) * d + (n_layers - n_cut) * whole + n_cut * cut + 2 * d

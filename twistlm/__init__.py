"""twistlm: language models that are trained once and deployed at any size (TwIST)."""

__version__ = "0.1.0"

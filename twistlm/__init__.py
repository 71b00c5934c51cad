"""twistlm: language models that are trained once and deployed at any size (TwIST)."""

from .tickets.register import register_when_loaded

__version__ = "0.1.0"

register_when_loaded()

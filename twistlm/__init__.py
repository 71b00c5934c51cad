"""twistlm: language models that are trained once and deployed at any size (TwIST).

From training to an evaluated ticket:

    import twistlm

    run = twistlm.train("demo")
    parent = twistlm.open_parent(run)
    ticket = parent.extract(ratio="6/12")
    print(ticket.evaluate().full)  # perplexity

Importing changes nothing outside this package and loads neither torch nor transformers: each name
below is fetched when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Parent, evaluate, open_parent, train
    from .config import Config
    from .tickets.deploy import load_ticket
    from .tickets.extract import Ticket
    from .tickets.register import register
    from .tickets.score import Scores

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Parent",
    "Scores",
    "Ticket",
    "__version__",
    "evaluate",
    "load_ticket",
    "open_parent",
    "register",
    "train",
]

_HOMES = {
    "Config": "config",
    "Parent": "api",
    "Scores": "tickets.score",
    "Ticket": "tickets.extract",
    "evaluate": "api",
    "load_ticket": "tickets.deploy",
    "open_parent": "api",
    "register": "tickets.register",
    "train": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from .system.compat import check_transformers

    check_transformers()
    found = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

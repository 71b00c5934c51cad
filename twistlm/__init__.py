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
    from .api import Parent as Parent
    from .api import evaluate as evaluate
    from .api import open_parent as open_parent
    from .api import shrink as shrink
    from .api import train as train
    from .config import Config as Config
    from .tickets.deploy import load_ticket as load_ticket
    from .tickets.extract import Ticket as Ticket
    from .tickets.register import register as register
    from .tickets.score import Scores as Scores

__version__ = "0.1.0"

_HOMES = {
    "Config": "config",
    "Parent": "api",
    "Scores": "tickets.score",
    "Ticket": "tickets.extract",
    "evaluate": "api",
    "load_ticket": "tickets.deploy",
    "open_parent": "api",
    "register": "tickets.register",
    "shrink": "api",
    "train": "api",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        hint = ": open_parent(...).extract(...) cuts a ticket" if name == "extract" else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    from importlib import import_module

    from .system.compat import check_transformers

    check_transformers()
    found = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

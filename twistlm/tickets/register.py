"""Make transformers load ticket folders; models that are no tickets load as before."""

from __future__ import annotations

from typing import Any

from ..system.compat import choose_config_class


def register() -> None:
    """Let `AutoModelForCausalLM.from_pretrained` take ticket folders; twice does nothing more.

    A ticket keeps its family's `model_type`, so that tokenizers and tools know it: what tells it
    from a stock model is the section `ticket` in its config.json. vLLM calls this as a plugin.
    """
    choose_config_class(_class_of)


def _class_of(chosen: type, config: dict[str, Any]) -> type:
    is_ticket = "projections" in (config.get("ticket") or ())
    if not is_ticket or chosen.__name__.startswith("Ticket"):
        return chosen
    from . import modeling_ticket

    return getattr(modeling_ticket, f"Ticket{chosen.__name__}")

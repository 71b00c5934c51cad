"""Make transformers load ticket folders; models that are no tickets load as before."""

from typing import Any


def register() -> None:
    """Let `AutoModelForCausalLM.from_pretrained` take ticket folders; twice does nothing more.

    A ticket keeps its family's `model_type`, so that tokenizers and tools know it: what tells it
    from a stock model is the section `ticket` in its config.json. transformers finds classes by
    `model_type` alone, and `AutoConfig.register` replaces one for all models of a type: two that
    share a type need this patch of `PreTrainedConfig.from_dict`. vLLM calls this as a plugin.
    """
    from transformers.configuration_utils import PreTrainedConfig

    stock: Any = PreTrainedConfig.__dict__["from_dict"].__func__
    if stock.__module__ == __name__:  # patched already
        return

    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        is_ticket = "projections" in (config_dict.get("ticket") or ())
        if is_ticket and not cls.__name__.startswith("Ticket"):
            from . import modeling_ticket

            cls = getattr(modeling_ticket, f"Ticket{cls.__name__}")
        return stock(cls, config_dict, **kwargs)

    setattr(PreTrainedConfig, "from_dict", classmethod(from_dict))  # noqa: B010 (mypy: a method)

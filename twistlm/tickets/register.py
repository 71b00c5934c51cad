"""transformers knows tickets as soon as twistlm is imported, and stock models stay stock."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import Any

CONFIGS = "transformers.configuration_utils"


def register() -> None:
    """Let `AutoModelForCausalLM.from_pretrained` take ticket folders (and vLLM: this is its plugin).

    A ticket keeps its family's `model_type`, so that tokenizers and tools know it, and AutoConfig
    finds classes by that alone: what tells a ticket from a stock model is a key in its config.json.
    """
    from transformers.configuration_utils import PreTrainedConfig

    stock: Any = PreTrainedConfig.__dict__["from_dict"].__func__
    if stock.__module__ == __name__:  # registered already
        return

    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        ours = "projections" in (config_dict.get("ticket") or ())
        if ours and not cls.__name__.startswith("Ticket"):
            from . import modeling_ticket

            cls = getattr(modeling_ticket, f"Ticket{cls.__name__}")
        return stock(cls, config_dict, **kwargs)

    setattr(PreTrainedConfig, "from_dict", classmethod(from_dict))  # noqa: B010 (mypy: a method)


def register_when_loaded() -> None:
    """Register now if transformers is imported, else as soon as it is: `import twistlm` is light."""
    if CONFIGS in sys.modules:
        register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(importlib.abc.MetaPathFinder):
    """Waits for the import of transformers' config classes, and registers right after it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != CONFIGS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                register()

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 (mypy: a method)
        return spec

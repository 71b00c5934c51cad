"""Where twistlm reaches into transformers beyond its public interface; imports happen in calls."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Any

TRANSFORMERS = ((5, 14), (6,))  # from, below: as pyproject.toml has it


def check_transformers() -> None:
    """Refuse a version of transformers that twistlm cannot work with, before it is imported."""
    least, below = TRANSFORMERS
    try:
        found = importlib.metadata.version("transformers")
        number = tuple(int(part) for part in found.split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):  # a build without a plain number
        return
    if not least <= number < below:
        wanted = f"transformers>={'.'.join(map(str, least))},<{below[0]}"
        raise ValueError(
            f"twistlm needs {wanted}, and transformers {found} is installed: pip install '{wanted}'"
        )


def choose_config_class(choose: Callable[[type, dict[str, Any]], type]) -> None:
    """Let `choose(class of transformers, config.json)` pick the config class; twice does nothing.

    transformers finds classes by `model_type` alone, and `AutoConfig.register` replaces one for all
    models of a type. Two classes that share a type need this patch of `PreTrainedConfig.from_dict`.
    """
    from transformers.configuration_utils import PreTrainedConfig

    stock: Any = PreTrainedConfig.__dict__["from_dict"].__func__
    if stock.__module__ == __name__:  # patched already
        return

    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return stock(choose(cls, config_dict), config_dict, **kwargs)

    setattr(PreTrainedConfig, "from_dict", classmethod(from_dict))  # noqa: B010 (mypy: a method)


def quiet_transformers() -> None:
    """Errors only and no progress bars from transformers, in this process and those it starts.

    What the user set in the environment stays.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # its bar for GGUF files
    if "transformers" in sys.modules:  # it has read the environment already
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()

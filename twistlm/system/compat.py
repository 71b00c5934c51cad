"""Where twistlm reaches into torch and transformers beyond their public interface: one place to
look.

Nothing happens at import, and neither library is imported before a function here is called.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Any

TRANSFORMERS = ((5, 14), (6,))  # from, below: as pyproject.toml has it

# (config class that transformers chose, contents of config.json) -> the class to use
ChooseClass = Callable[[type, dict[str, Any]], type]


def check_transformers() -> None:
    """A version of transformers that twistlm cannot work with is one sentence, before anything is
    imported.
    """
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


def choose_config_class(choose: ChooseClass) -> None:
    """Let `choose` replace the class that transformers picks for a config.json; a second call does
    nothing.

    transformers finds config classes by `model_type` alone, and `AutoConfig.register` can only
    replace the class of a type for all models of it. Two classes that share a type need this patch
    of `PreTrainedConfig.from_dict`.
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

    For programs whose own output is all that should be seen: the command line. What the user set in
    the environment stays.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # its bar for GGUF files
    if "transformers" in sys.modules:  # it has read the environment already
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()

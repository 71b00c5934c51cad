"""The version of transformers, and its silence; nothing is imported before a call."""

import importlib.metadata
import os
import sys

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
        here = f"transformers {found} is installed"
        raise ValueError(f"twistlm needs {wanted}, and {here}: pip install '{wanted}'")


def quiet_transformers() -> None:
    """Errors only and no bars from transformers, here and in processes that this one starts."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    quiet["TQDM_DISABLE"] = "1"  # its bar for GGUF files
    for name, value in quiet.items():
        os.environ.setdefault(name, value)  # what the user set stays
    if "transformers" in sys.modules:  # it has read the environment already
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()

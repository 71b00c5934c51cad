"""Whether a name of a model or tokenizer means a path on this machine or one on the hub."""

import re
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

# NAME or OWNER/NAME, as the hub allows them
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
FILES = {".bin", ".gguf", ".h5", ".json", ".pt", ".pth", ".safetensors", ".toml", ".txt", ".zip"}


def check_source(source: str | Path, file: str = "config.json") -> None:
    """Refuse what is neither a path here nor a hub repository with `file`, asking the hub once."""
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        raise ValueError(f"it is a GGUF file: write gguf:{source}")
    if path.exists():
        return
    name = str(source)
    is_path = not HUB_ID.fullmatch(name) or path.suffix in FILES or path.is_absolute()
    if is_path or (len(path.parts) == 2 and path.parent.is_dir()):
        raise ValueError(f"there is no such {'file' if path.suffix else 'folder'}")
    if try_to_load_from_cache(name, file) is not None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, file), timeout=10)  # a download would ask six times
        return
    except EntryNotFoundError:
        reason = f"the hub's has no {file}"
    except HfHubHTTPError:
        reason = "the hub knows no such name"
    except Exception as error:  # no network, a proxy, offline mode: every library has its own
        reason = f"the hub cannot be asked ({type(error).__name__})"
    raise ValueError(f"there is no such folder here, and {reason}")

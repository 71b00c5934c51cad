"""`twistlm verify`: whether files that twistlm wrote are as they were written."""

from pathlib import Path

from ..data.teacher_cache import verify_teacher_cache
from ..data.token_file import open_tokens, verify_tokens
from ..system import manifest
from ..training import checkpoint
from .deploy import verify_ticket
from .parent import what_is


def verify(source: str) -> list[str]:
    """Read every byte of a token file, ticket, checkpoint or run; a sentence for each whole one.

    The first damage is a ValueError that names the file.
    """
    folder = Path(source)
    if not folder.is_dir():
        told = verify_teacher_cache(open_tokens(source))
        return [verify_tokens(source), *([told] if told else [])]
    if what_is(source) == "ticket":
        n = len(verify_ticket(folder).get(manifest.FILES, ()))
        if not n:
            return [f"ticket {source}: nothing vouches for its files (written before manifests)"]
        return [f"ticket {source}: {n} files match their sha256"]
    is_one = (folder / checkpoint.MANIFEST).is_file()
    paths = [folder] if is_one else checkpoint.numbered(folder / "checkpoints")
    if not paths:
        raise ValueError(f"{source} is no token file, ticket, checkpoint or run: nothing to verify")
    return [
        f"checkpoint {each.path}: {len(each.manifest['files'])} files match their sha256"
        for each in map(checkpoint.verify, paths)
    ]

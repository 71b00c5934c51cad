"""Any model that runs as it is (ticket, whole checkpoint, Hugging Face model), and its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..data.teacher_cache import verify_teacher_cache
from ..data.token_file import open_tokens, verify_tokens
from ..model import huggingface
from ..model.tokenizer import encode, load_tokenizer
from ..system import manifest
from ..system.device import pick_device
from ..training import checkpoint
from .deploy import load_ticket, verify_ticket
from .parent import what_is


@dataclass(frozen=True)
class Runnable:
    """A model in memory and the place where its tokenizer lies."""

    source: str
    model: PreTrainedModel

    def tokenizer(self) -> Tokenizer:
        try:
            return load_tokenizer(self.source)
        except ValueError as error:
            raise ValueError(f"{self.source} can read no text: {error}") from None

    def tokenizer_file(self, folder: Path) -> Path | None:
        """Its tokenizer.json, or one written into `folder` where it keeps its tokens elsewhere."""
        beside = Path(self.source) / "tokenizer.json"
        if beside.is_file():
            return beside
        try:
            self.tokenizer().save(str(folder / "tokenizer.json"))
        except ValueError:  # it has none
            return None
        return folder / "tokenizer.json"


def open_runnable(source: str | Path, device: str = "auto") -> Runnable:
    """Open a ticket, a run folder or checkpoint, a Hugging Face folder or hub id, or gguf:FILE."""
    kind, where = what_is(source), pick_device(device)
    name = str(source)
    if kind == "ticket":
        model = load_ticket(Path(source))
    elif kind == "checkpoint":
        found = checkpoint.open_(source)
        name, model = str(found.path), checkpoint.template(found)
    else:
        model = huggingface.pretrained(name)
    torch.nn.Module.to(model, where)
    # An author's sampling defaults would pass for ours, so only the ends of a text are kept. There
    # is no padding token either: one sequence needs none, and assisted generation hides every such
    # token of a prompt from the draft model.
    ids = ("bos_token_id", "eos_token_id")
    kept = {key: getattr(model.generation_config, key) for key in ids}
    model.generation_config = GenerationConfig(**kept)
    return Runnable(name, model.eval())


def check_room(runnable: Runnable, n_prompt: int, max_new_tokens: int | None) -> int:
    """How many tokens to write after a prompt: what was asked, or by default 100 if they fit."""
    if n_prompt < 1:
        raise ValueError("the prompt is empty: give at least one token")
    most = getattr(runnable.model.config, "max_position_embeddings", None) or 1 << 30
    room = most - n_prompt
    if room < (max_new_tokens or 1):
        raise ValueError(
            f"{runnable.source} has {most} positions and the prompt takes "
            f"{n_prompt}: {max(0, room)} tokens fit after it"
            + (f", not --max-new-tokens {max_new_tokens}" if max_new_tokens else "")
        )
    return max_new_tokens or min(100, room)


class Stream(BaseStreamer):
    """Hands text on as soon as its bytes are complete: what `generate` calls with each token."""

    def __init__(self, tokenizer: Tokenizer, emit: Callable[[str], None]):
        self.tokenizer, self.emit = tokenizer, emit
        self.decoder = DecodeStream(skip_special_tokens=True)

    def put(self, value: Tensor) -> None:
        for token in value.flatten().tolist():  # the prompt comes first, as a whole
            if text := self.decoder.step(self.tokenizer, token):
                self.emit(text)

    def end(self) -> None:
        pass


def write(
    runnable: Runnable,
    prompt: str,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    emit: Callable[[str], None],
) -> list[int]:
    """Emit the prompt and its continuation; greedy, unless a temperature or top-k asks to draw."""
    tokenizer = runnable.tokenizer()
    ids = torch.tensor(encode(tokenizer, [prompt])[0].ids, dtype=torch.long)
    n_new = check_room(runnable, len(ids), max_new_tokens)
    options: dict[str, Any] = {"streamer": Stream(tokenizer, emit)}
    if temperature is not None or top_k is not None:
        # top_k = 0 is "all tokens": transformers' own default would be 50
        options |= {"do_sample": True, "temperature": temperature or 1.0, "top_k": top_k or 0}
        torch.manual_seed(seed)
    return generate(runnable, ids, n_new, **options).tolist()


@torch.no_grad()
def generate(runnable: Runnable, ids: Tensor, n_new: int, **options: Any) -> Tensor:
    """The prompt (int64 [length]) and its continuation; greedy, unless options say otherwise."""
    model: Any = runnable.model
    ids, more = ids[None].to(model.device), {"do_sample": False, **options}
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=n_new, **more)[0]


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

"""Any model that runs as it is (ticket, whole checkpoint, Hugging Face model), and its text."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, tee
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import GenerationConfig, PreTrainedModel

from ..model import huggingface
from ..model.tokenizer import encode, load_tokenizer
from ..system.device import pick_device
from .deploy import load_ticket
from .parent import load, what_is


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
    if what_is(source) == "ticket":
        name, model = str(source), load_ticket(source)
    else:
        name, model, _ = load(source)
    torch.nn.Module.to(model, pick_device(device))
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
    most = huggingface.n_positions(runnable.model)
    room = most - n_prompt
    if room < (max_new_tokens or 1):
        raise ValueError(
            f"{runnable.source} has {most} positions and the prompt takes "
            f"{n_prompt}: {max(0, room)} tokens fit after it"
            + (f", not --max-new-tokens {max_new_tokens}" if max_new_tokens else "")
        )
    return max_new_tokens or min(100, room)


@torch.inference_mode()
def generate_tokens(
    model: PreTrainedModel,
    ids: list[int],
    temperature: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """What a model writes after a prompt until it ends the text: greedily, unless asked to draw."""
    ends, cache, rng = model.generation_config.eos_token_id, None, torch.Generator()
    rng.manual_seed(seed)
    while True:
        fed: Any = torch.tensor([ids], device=model.device)
        out = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, cache = out.logits[0, -1].float().cpu(), out.past_key_values
        ids = [int(logits.argmax())]
        if not logits[ids[0]].isfinite():  # the largest, which a NaN is, too
            raise ValueError("the model writes nothing: its logits are not finite")
        if temperature or top_k:
            logits /= temperature or 1.0
            if top_k:
                logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -math.inf
            ids = torch.multinomial(logits.softmax(-1), 1, generator=rng).tolist()
        yield ids[0]
        if ids[0] in (ends if isinstance(ends, list) else [ends]):
            return


def write_text(
    runnable: Runnable,
    prompt: str,
    *,
    max_new_tokens: int | None = None,
    emit: Callable[[str], None],
    **how: Any,
) -> list[int]:
    """Emit the prompt and its continuation as soon as bytes are complete; `how` they are drawn."""
    tokenizer = runnable.tokenizer()
    ids = encode(tokenizer, [prompt])[0].ids
    n_new = check_room(runnable, len(ids), max_new_tokens)
    new = islice(generate_tokens(runnable.model, ids, **how), n_new)
    tokens, written = tee(chain(ids, new))
    for text in decoded(tokenizer, tokens):
        emit(text)
    return list(written)


def decoded(
    tokenizer: Tokenizer, tokens: Iterable[int], before: Sequence[int] = ()
) -> Iterator[str]:
    """What each token adds to the text `before` it; nothing while its bytes are not complete."""
    decoder = DecodeStream(list(before[-8:]), skip_special_tokens=True)  # a space may need them
    for token in tokens:
        yield decoder.step(tokenizer, token) or ""

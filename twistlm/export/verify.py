"""Every export is compared with torch on the spot: logits, greedy tokens, perplexity, speed."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from ..compute.perplexity import Text
from ..model import huggingface
from ..model.tokenizer import load_tokenizer
from ..system import manifest, provenance, terminal

PROMPT = "The city lies on both banks of the river and"
N_NEW = 24
EXACT = 1e-3  # largest |Δlogit| of a float32 export, as a share of the largest |logit|


class Runner(ABC):
    """A model in some runtime, with the cache of one sequence."""

    @abstractmethod
    def prefill(self, ids: Sequence[int], n_logits: int = 1, *, after: bool = False) -> np.ndarray:
        """Logits of the last positions [n_logits, vocab] of `ids`, or `after` what came before."""

    def decode(self, token: int) -> np.ndarray:
        """Read one more token: [vocab]."""
        return self.prefill([token], after=True)[0]


@dataclass(frozen=True)
class Verified:
    """One runtime beside torch."""

    name: str
    n_bytes: int
    prefill_delta: float  # max |Δlogit| over the prompt
    decode_delta: float  # and over the tokens after it, one at a time through the cache
    n_equal: int  # greedy tokens that are torch's
    n_tokens: int
    decode_speed: float  # tokens per second in this very comparison
    text: str | None  # what the runtime itself writes after the prompt
    perplexity: float | None = None


class TorchRunner(Runner):
    """A Hugging Face model."""

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._cache = DynamicCache()

    @torch.no_grad()
    def prefill(self, ids: Sequence[int], n_logits: int = 1, *, after: bool = False) -> np.ndarray:
        if not after:
            self._cache = DynamicCache()
        kept: Any = {"past_key_values": self._cache, "logits_to_keep": n_logits}
        out: Any = self._model(input_ids=torch.tensor([list(ids)]), use_cache=True, **kept)
        return out.logits[0].float().numpy()


def greedy(runner: Runner, prompt: Sequence[int], n_tokens: int) -> list[int]:
    """The n most probable next tokens, one after another."""
    tokens = [int(runner.prefill(prompt)[-1].argmax())]
    while len(tokens) < n_tokens:
        tokens.append(int(runner.decode(tokens[-1]).argmax()))
    return tokens


class Comparison:
    """torch's greedy text after a prompt and its logits, and the runtimes that were held to it."""

    @torch.no_grad()
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Path | None,
        text: Text | None,
        prompt: str = PROMPT,
    ):
        self.tokenizer = load_tokenizer(str(tokenizer)) if tokenizer else None
        self.text, most = text, huggingface.n_positions(model)
        if self.tokenizer:
            ids = self.tokenizer.encode(prompt).ids
            if prompt == PROMPT:  # as much as a short model takes
                ids = ids[: most // 2]
            if not ids or len(ids) + 2 > most:
                raise ValueError(f"--prompt has {len(ids)} tokens; legal are 1..{most - 2}")
        else:
            rng = np.random.default_rng(0)
            ids = rng.integers(huggingface.vocab_size(model), size=min(16, most // 2)).tolist()
        self.prompt: list[int] = ids
        # by the cache; then its logits again, in one pass without
        self.tokens = greedy(TorchRunner(model), ids, min(N_NEW, most - len(ids)))
        out: Any = model(input_ids=torch.tensor([ids + self.tokens]), use_cache=False)
        self.logits = out.logits[0].float().numpy()  # [len(prompt) + len(tokens), vocab]
        self.rows: list[Verified] = []
        self.add("torch f32", TorchRunner(model), model.get_memory_footprint(return_buffers=False))

    def add(self, name: str, runner: Runner, n_bytes: int, exact: bool = False) -> Verified:
        """Feed torch's own tokens: argmax equal at every step means greedy text equal.

        A float32 export, `exact`, that computes something else is refused before it gets its name.
        """
        n, n_tokens = len(self.prompt), len(self.tokens)
        prompt_logits = runner.prefill(self.prompt, n)
        start = time.perf_counter()
        after = np.array([runner.decode(token) for token in self.tokens])
        decode_speed = n_tokens / (time.perf_counter() - start)
        guesses = np.array([prompt_logits[-1], *after[:-1]]).argmax(axis=1)
        written = self.prompt + greedy(runner, self.prompt, n_tokens)
        row = Verified(
            name=name,
            n_bytes=n_bytes,
            prefill_delta=float(np.abs(prompt_logits - self.logits[:n]).max()),
            decode_delta=float(np.abs(after - self.logits[n:]).max()),
            n_equal=int((guesses == self.tokens).sum()),
            n_tokens=n_tokens,
            decode_speed=decode_speed,
            text=self.tokenizer.decode(written) if self.tokenizer else None,
            perplexity=None if self.text is None else _perplexity(runner, self.text),
        )
        worst, largest = max(row.prefill_delta, row.decode_delta), float(np.abs(self.logits).max())
        if exact and not worst <= EXACT * max(1.0, largest):
            raise ValueError(
                f"{name} does not compute what torch computes (max |Δlogit| {worst:.2g} at logits "
                f"up to {largest:.2g}): nothing was written"
            )
        self.rows.append(row)
        return row

    def write(self, path: Path, **about: Any) -> None:
        """The comparison as JSON, with command, code and machine."""
        record = about | {"verified": [asdict(row) for row in self.rows]}
        path.write_text(manifest.written(record | provenance.describe_run()))


def table(rows: list[Verified]) -> Table:
    """What the command prints."""
    with_text = rows[0].perplexity is not None
    heads = ["runtime", "MB", "max |Δlogit| prompt", "decoding", "greedy equal", "decode tok/s"]
    heads += ["perplexity"] if with_text else []
    result = terminal.table(f"{rows[-1].name} against torch", *heads)
    for row in rows:
        cells = [f"{row.n_bytes / 1e6:.1f}", f"{row.prefill_delta:.1e}", f"{row.decode_delta:.1e}"]
        cells += [f"{row.n_equal}/{row.n_tokens}", f"{row.decode_speed:.1f}"]
        cells += [f"{row.perplexity:.3f}"] if with_text else []
        result.add_row(row.name, *cells)
    return result


def _perplexity(runner: Runner, text: Text) -> float:
    """exp of the mean next-token loss over the same windows as `compute.perplexity`."""
    total = 0.0
    for row in range(text.n_sequences):
        ids = text.file.sequences([text.first + row], text.seq_len)[0]
        logits = torch.from_numpy(runner.prefill(ids.tolist(), len(ids))[:-1])
        total += float(torch.nn.functional.cross_entropy(logits.double(), ids[1:]))
    return math.exp(min(total / text.n_sequences, 700.0))

"""`twistlm lab draft`: a ticket drafts for its own parent in Hugging Face's assisted generation.

Each step the ticket proposes a few tokens, one forward pass of the parent checks them all, and the
longest correct beginning plus one token of the parent's own is kept: the parent's greedy text, in
fewer passes of the parent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..data.builtin import resolve
from ..data.token_file import open_tokens
from ..model import huggingface
from ..system import terminal
from ..system.provenance import describe_run
from ..system.terminal import progress
from .runnable import Runnable, check_room

TIE = 1e-3  # logits this close are a tie: a batched pass rounds otherwise than a single one


@dataclass(frozen=True)
class Draft:
    """One prompt, continued by the parent alone and with the ticket's drafts."""

    n_prompt: int
    n_plain: int  # tokens written by the parent alone
    n_new: int  # and with drafts
    n_parent: int  # forward passes of the parent: each writes one token of its own
    n_proposed: int  # forward passes of the ticket: each proposes one token
    plain_s: float
    drafted_s: float
    gap: float | None  # the parent's top-2 logit gap where the texts part; None: identical

    @property
    def n_accepted(self) -> int:
        return self.n_new - self.n_parent


@dataclass(frozen=True)
class Drafts:
    """What a ticket's drafts save."""

    parent: str
    ticket: str
    n_draft: int
    rows: tuple[Draft, ...]
    run: dict[str, Any]

    def _sum(self, name: str) -> float:
        return sum(getattr(row, name) for row in self.rows)

    @property
    def acceptance(self) -> float:
        """The share of proposed tokens that the parent would have written too."""
        return self._sum("n_accepted") / max(1, self._sum("n_proposed"))

    @property
    def tokens_per_pass(self) -> float:
        """Tokens written per forward pass of the parent; 1 without drafts."""
        return self._sum("n_new") / self._sum("n_parent")

    @property
    def plain_rate(self) -> float:
        """Tokens per second of the parent alone."""
        return self._sum("n_plain") / self._sum("plain_s")

    @property
    def drafted_rate(self) -> float:
        return self._sum("n_new") / self._sum("drafted_s")

    def to_dict(self) -> dict[str, Any]:
        names = ("acceptance", "tokens_per_pass", "plain_rate", "drafted_rate")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


def prompts(
    parent: Runnable, texts: list[str], data: str | None, n: int, n_tokens: int
) -> list[Tensor]:
    """Typed prompts, and n windows spread over a token file: int64 [length]."""
    if not texts and data is None:
        raise ValueError("nothing to go on from: give --prompt TEXT or --data STEM")
    tokenizer = parent.tokenizer() if texts else None
    found = [torch.tensor(tokenizer.encode(text).ids) for text in texts] if tokenizer else []
    if data is not None:
        file = open_tokens(resolve(data, "valid"))
        file.check(n_tokens, huggingface.vocab_size(parent.model))
        n_windows = file.n_sequences(n_tokens)
        n = min(n, n_windows)
        found += list(file.sequences([i * n_windows // n for i in range(n)], n_tokens))
    return found


@contextmanager
def count_passes(model: Any) -> Iterator[list[None]]:
    """A list that grows by one with every forward pass."""
    passes: list[None] = []
    handle = model.register_forward_pre_hook(lambda module, args: passes.append(None))
    try:
        yield passes
    finally:
        handle.remove()


@torch.no_grad()
def draft(
    parent: Runnable,
    ticket: Runnable,
    prompts: list[Tensor],
    *,
    max_new_tokens: int | None = None,
    n_draft: int = 5,
    quiet: bool = False,
) -> Drafts:
    """Continue each prompt (int64 [length]) greedily, alone and with drafts, one after the other."""
    sizes = [huggingface.vocab_size(runnable.model) for runnable in (parent, ticket)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{ticket.source} cannot draft for {parent.source}: their vocabularies have {sizes[1]} "
            f"and {sizes[0]} tokens"
        )
    n_new = [check_room(parent, len(prompt), max_new_tokens) for prompt in prompts]
    config: Any = ticket.model.generation_config
    config.num_assistant_tokens = n_draft
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0  # always n_draft tokens: nothing adapts
    rows = []
    with progress(quiet) as bar:
        task = bar.add_task("draft", total=len(prompts), note="")
        # the first call of a process pays for everything that is set up once
        _continue(parent, prompts[0], min(4, n_new[0]), ticket)
        for prompt, n in zip(prompts, n_new, strict=True):
            rows.append(_both_ways(parent, ticket, prompt, n))
            bar.advance(task)
    return Drafts(parent.source, ticket.source, n_draft, tuple(rows), describe_run())


def _both_ways(parent: Runnable, ticket: Runnable, prompt: Tensor, n_new: int) -> Draft:
    began = time.perf_counter()
    plain = _continue(parent, prompt, n_new)
    middle = time.perf_counter()
    with count_passes(parent.model) as checks, count_passes(ticket.model) as proposals:
        drafted = _continue(parent, prompt, n_new, ticket)
    return Draft(
        n_prompt=len(prompt),
        n_plain=len(plain) - len(prompt),
        n_new=len(drafted) - len(prompt),
        n_parent=len(checks),
        n_proposed=len(proposals),
        plain_s=middle - began,
        drafted_s=time.perf_counter() - middle,
        gap=None if torch.equal(plain, drafted) else _gap(parent, plain, drafted),
    )


def _continue(
    parent: Runnable, prompt: Tensor, n_new: int, assistant: Runnable | None = None
) -> Tensor:
    """The parent's greedy text, int64 [length]."""
    model: Any = parent.model
    ids = prompt[None].to(model.device)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n_new,
        do_sample=False,
        assistant_model=assistant.model if assistant else None,
    )[0]


@torch.no_grad()
def _gap(parent: Runnable, plain: Tensor, drafted: Tensor) -> float:
    """How close the parent's two best logits are where the two texts part."""
    n = min(len(plain), len(drafted))
    parting = int((plain[:n] == drafted[:n]).long().cumprod(0).sum())
    logits = parent.model(input_ids=plain[None, :parting], use_cache=False).logits[0, -1]
    best = logits.float().topk(2).values
    return float(best[0] - best[1])


def table(made: Drafts) -> Table:
    """Speed and passes with and without drafts."""
    title = (
        f"{len(made.rows)} prompts, {made._sum('n_new'):,} tokens written greedily, "
        f"{made.n_draft} drafted at a time"
    )
    heads = ("", "tokens/s", "tokens per parent pass", "drafts accepted")
    result = terminal.table(title, *heads)
    rate = f"{made.drafted_rate:.1f} ({made.drafted_rate / made.plain_rate:.2f}x)"
    result.add_row("parent alone", f"{made.plain_rate:.1f}", "1.00", "")
    result.add_row("with drafts", rate, f"{made.tokens_per_pass:.2f}", f"{made.acceptance:.1%}")
    return result


def reading(made: Drafts) -> str:
    """Whether the text is the parent's own."""
    gaps = [row.gap for row in made.rows if row.gap is not None]
    if not gaps:
        return f"The text is identical to the parent's own in all {len(made.rows)} cases."
    ties = sum(gap < TIE for gap in gaps)
    return (
        f"The text is identical to the parent's own in {len(made.rows) - len(gaps)} of "
        f"{len(made.rows)} cases; {ties} of the other {len(gaps)} part at a tie (the parent's two "
        f"best logits differ by less than {TIE})."
    )

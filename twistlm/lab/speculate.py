"""`twistlm lab draft`: a ticket drafts for its own parent in Hugging Face's assisted generation.

Each step the ticket proposes a few tokens, one forward pass of the parent checks them all, and the
longest correct beginning plus one token of the parent's own is kept: the parent's greedy text, in
fewer passes of the parent.
"""

import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..data.builtin import resolve
from ..data.token_file import open_tokens
from ..model import huggingface
from ..model.tokenizer import encode
from ..system import terminal
from ..system.provenance import describe_run
from ..system.terminal import progress
from ..tickets.runnable import Runnable, check_room


def prompts(
    parent: Runnable, texts: list[str], data: str | None, n: int, n_tokens: int
) -> list[Tensor]:
    """Typed prompts, and n windows spread over a token file: int64 [length]."""
    if not texts and data is None:
        raise ValueError("nothing to go on from: give --prompt TEXT or --data STEM")
    found = [torch.tensor(e.ids) for e in encode(parent.tokenizer(), texts)] if texts else []
    if data is not None:
        file = open_tokens(resolve(data, "valid"))
        file.check(n_tokens, huggingface.vocab_size(parent.model))
        n_windows = file.n_sequences(n_tokens)
        n = min(n, n_windows)
        found += list(file.sequences([i * n_windows // n for i in range(n)], n_tokens))
    return found


def draft(
    parent: Runnable,
    ticket: Runnable,
    prompts: list[Tensor],
    max_new_tokens: int | None,
    n_draft: int,
) -> dict[str, Any]:
    """Continue each prompt (int64 [length]) greedily, alone and with `n_draft` drafts at a time."""
    sizes = [huggingface.vocab_size(runnable.model) for runnable in (parent, ticket)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{ticket.source} cannot draft for {parent.source}: their vocabularies have {sizes[1]} "
            f"and {sizes[0]} tokens"
        )
    rooms = [check_room(parent, len(prompt), max_new_tokens) for prompt in prompts]
    config: Any = ticket.model.generation_config
    config.num_assistant_tokens = n_draft
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0  # always n_draft tokens: nothing adapts
    passes: Counter[str] = Counter()  # every pass of the ticket proposes one token
    rows: list[dict[str, Any]] = []
    counted = {"n_parent": parent.model, "n_proposed": ticket.model}
    with progress() as bar, ExitStack() as hooks:
        for name, model in counted.items():
            hook = model.register_forward_pre_hook(lambda *_, name=name: passes.update([name]))
            hooks.enter_context(hook)
        task = bar.add_task("draft", total=len(prompts), note="")
        # the first call of a process pays for everything that is set up once
        generate(parent, prompts[0], min(4, rooms[0]), assistant_model=ticket.model)
        for prompt, n in zip(prompts, rooms, strict=True):
            began = time.perf_counter()
            plain = generate(parent, prompt, n)
            middle = time.perf_counter()
            passes.clear()
            drafted = generate(parent, prompt, n, assistant_model=ticket.model)
            ended = time.perf_counter()
            n_new = len(drafted) - len(prompt)
            rows.append(
                {
                    "n_prompt": len(prompt),
                    "n_plain": len(plain) - len(prompt),
                    "n_new": n_new,
                    "n_parent": passes["n_parent"],
                    "n_proposed": passes["n_proposed"],
                    "n_accepted": n_new - passes["n_parent"],  # one of a pass is its own
                    "plain_s": middle - began,
                    "drafted_s": ended - middle,
                    "same": torch.equal(plain, drafted),
                }
            )
            bar.advance(task)
    sums = {name: sum(row[name] for row in rows) for name in rows[0]}
    return {
        "parent": parent.source,
        "ticket": ticket.source,
        "n_draft": n_draft,
        "rows": rows,
        "acceptance": sums["n_accepted"] / max(1, sums["n_proposed"]),  # share of what is proposed
        "tokens_per_pass": sums["n_new"] / sums["n_parent"],  # of the parent; 1 without drafts
        "plain_rate": sums["n_plain"] / sums["plain_s"],  # tokens per second of the parent alone
        "drafted_rate": sums["n_new"] / sums["drafted_s"],
        "run": describe_run(),
    }


@torch.no_grad()
def generate(runnable: Runnable, ids: Tensor, n_new: int, **options: Any) -> Tensor:
    """The prompt (int64 [length]) and its greedy continuation by Hugging Face's own loop."""
    model: Any = runnable.model
    ids = ids[None].to(model.device)
    said = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    return model.generate(ids, max_new_tokens=n_new, **said)[0]


def table(made: dict[str, Any]) -> Table:
    """Speed and passes with and without drafts."""
    n, plain, drafted = len(made["rows"]), made["plain_rate"], made["drafted_rate"]
    title = f"{n} prompts, written greedily, {made['n_draft']} tokens drafted at a time"
    result = terminal.table(title, "", "tokens/s", "tokens per parent pass", "drafts accepted")
    result.add_row("parent alone", f"{plain:.1f}", "1.00", "")
    rate, per_pass = f"{drafted:.1f} ({drafted / plain:.2f}x)", f"{made['tokens_per_pass']:.2f}"
    result.add_row("with drafts", rate, per_pass, f"{made['acceptance']:.1%}")
    return result


def reading(made: dict[str, Any]) -> str:
    """Whether the text is the parent's own; a batched pass may round a tie to another token."""
    same = sum(row["same"] for row in made["rows"])
    return f"The text is identical to the parent's own in {same} of {len(made['rows'])} cases."

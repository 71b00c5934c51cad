"""The models behind the page: a parent, and tickets that are cut, measured and write in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import DynamicCache, PreTrainedModel

from ..compute import speed
from ..compute.perplexity import Evaluator, perplexity
from ..model import huggingface
from ..model.blocks import Blueprint, Widths, widths_of_ratio
from ..model.tokenizer import load_tokenizer
from ..tickets import deploy, stock
from ..tickets.budget import ladder, weights_bytes
from ..tickets.card import last_evaluation
from ..tickets.parent import Parent, open_parent
from ..tickets.pick import AUTO, NESTED, RANDOM, parse_pick, pick_blocks, pick_for
from ..tickets.score import evaluator
from . import PICKS

N_TOKENS = 8192  # of text behind a perplexity, where the run does not say (run.eval_tokens)
MOST_PROMPT = 512  # tokens that are read of a prompt
PROMPT_WORDS = 4  # of the validation text, as the first prompt
TOP_K = 10  # the likeliest tokens, one of which is drawn


@dataclass(frozen=True)
class TicketChoice:
    """Which ticket: its place among the sizes, how its blocks are picked, the seed of a draw."""

    size: int  # 1 is the smallest
    pick: str = PICKS[0]
    seed: int = 0


class Models:
    """A parent, its whole model and the ticket that was cut last."""

    def __init__(self, source: str, device: str, overrides: list[str], data: str | None):
        self.parent: Parent = open_parent(source, device, overrides)
        self.sizes: list[Widths] = ladder(self.parent.block_map)
        self.whole = deploy.cut_ticket(self.parent, self.parent.block_map.full())
        self.tokenizer = _tokenizer(self.parent, source)
        self.evaluator: Evaluator | None = None
        try:
            self.evaluator = evaluator(
                self.parent, data, self.parent.cfg.run.eval_tokens or N_TOKENS
            )
            text, option = self.evaluator.text, f" --data {data}" if data else ""
            n = text.n_sequences * text.seq_len
            self.measured_on = (
                f"perplexity on the first {n:,} tokens of {text.file.stem}, as by "
                f"`twistlm eval {source}{option} --tokens {n}`"
            )
        except ValueError as error:
            if data:
                raise
            self.measured_on = f"no perplexity: {error}"
        self.of_whole: dict[str, Any] = {}  # what was measured
        self.of_tickets: dict[TicketChoice, dict[str, Any]] = {}
        self.last: tuple[TicketChoice, PreTrainedModel] | None = None

    def describe(self) -> Iterator[dict[str, Any]]:
        """What the page shows before anything is asked."""
        block_map, layout = self.parent.block_map, self.parent.central.layout
        kinds = {group.kind: group for group in block_map.groups}
        yield {
            "source": self.parent.source,
            "family": self.parent.template.config.model_type,
            "device": str(self.whole.device),
            "sizes": [
                ", ".join(f"{k} {widths[g.name]}/{g.n_blocks}" for k, g in kinds.items())
                for widths in self.sizes
            ],
            "parameters": [layout.narrowed(block_map, w).n_params for w in self.sizes],
            "known": [_known(self.parent, widths) for widths in self.sizes],
            "pick": pick_for(self.parent, AUTO).asked,
            "measured_on": self.measured_on,
            "has_text": self.evaluator is not None,
            "prompt": self._first_words(),
            "has_tokenizer": self.tokenizer is not None,
        }

    def measure(self, choice: TicketChoice) -> Iterator[dict[str, Any]]:
        """Size, speed and perplexity of the whole model and a ticket, each as soon as known."""
        choice = self._checked(choice)
        models = {"whole": self.whole, "ticket": self.ticket(choice)}
        found = {"whole": self.of_whole, "ticket": self.of_tickets.setdefault(choice, {})}
        for name, model in models.items():
            shapes = huggingface.shapes(model)
            found[name]["parameters"] = sum(p.numel() for p in model.parameters())
            found[name]["bytes"] = weights_bytes(shapes)
            is_stock = not isinstance(stock.stock_config(self.parent.template, shapes), str)
            found[name]["stock"] = is_stock
        yield found
        if "ms" not in found["ticket"]:  # both in turn: a busy machine slows them alike
            speeds = speed.measure_all(list(models.values()), n_repeats=2, n_prompt=16, n_steps=8)
            for each, measured in zip(found.values(), speeds, strict=True):
                each["ms"] = min(each.get("ms", math.inf), measured.fastest_decode_ms)
        yield found
        for name, model in models.items():
            if self.evaluator is not None and "perplexity" not in found[name]:
                precision = self.parent.cfg.train.precision
                found[name]["perplexity"] = perplexity(model, self.evaluator.text, precision)
        yield found

    @torch.inference_mode()
    def write(
        self, choice: TicketChoice, prompt: str, n_new: int, temperature: float
    ) -> Iterator[dict[str, str]]:
        """What the whole model and the ticket write after a prompt, token by token in turn."""
        seed, choice = choice.seed, self._checked(choice)
        if self.tokenizer is None:
            raise ValueError(f"{self.parent.source} has no tokenizer: it can read no text")
        if not (temperature == 0 or 0.01 <= temperature <= 10):
            raise ValueError(
                f"temperature {temperature}: legal are 0, which takes the likeliest token, and "
                "0.01 to 10"
            )
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the prompt is no text: {prompt[error.start]!a} is half of a surrogate pair"
            ) from None
        ids = self.tokenizer.encode(prompt[-100 * MOST_PROMPT :]).ids or [0]
        room = getattr(self.whole.config, "max_position_embeddings", None) or 1 << 20
        n_new = max(1, min(n_new, room // 2))
        read = ids[-min(MOST_PROMPT, room - n_new) :]
        note = f"the last {len(read):,} of {len(ids):,} tokens of the prompt were read"
        writers = {
            name: _Writer(model, self.tokenizer, read, temperature, seed)
            for name, model in (("whole", self.whole), ("ticket", self.ticket(choice)))
        }
        for _ in range(n_new):
            for writer in writers.values():
                writer.step()
            texts = {name: writer.text for name, writer in writers.items()}
            yield {"note": note if len(read) < len(ids) else "", **texts}
            if all(writer.ended for writer in writers.values()):
                return

    def ticket(self, choice: TicketChoice) -> PreTrainedModel:
        """The chosen ticket, cut if it is not the last one."""
        if self.last is None or self.last[0] != choice:
            self.last = None  # room for the new one
            self.last = choice, deploy.cut_ticket(self.parent, self.blueprint(choice))
        return self.last[1]

    def blueprint(self, choice: TicketChoice) -> Blueprint:
        """The blocks that `extract` picks; a parent without an order nests by their magnitude."""
        has_order = bool(self.parent.progress.order)
        how = {
            "nested": NESTED if has_order else parse_pick("importance:magnitude"),
            "random": RANDOM,
            "best of 4": parse_pick("best-of:4"),
        }[choice.pick]
        if how.needs_perplexity and self.evaluator is None:
            raise ValueError(f"the {choice.pick} is chosen by perplexity; {self.measured_on}")
        widths, seed = self.sizes[choice.size - 1], choice.seed
        return pick_blocks(self.parent, widths, how, seed=seed, evaluator=self.evaluator)[0]

    def _checked(self, choice: TicketChoice) -> TicketChoice:
        """A legal choice; only random blocks depend on the seed."""
        if choice.pick not in PICKS or not 1 <= choice.size <= len(self.sizes):
            raise ValueError(
                f"size {choice.size}, blocks {choice.pick!r}: sizes are 1..{len(self.sizes)}, "
                f"blocks {', '.join(PICKS)}"
            )
        if not 0 <= choice.seed < 2**63:
            raise ValueError(f"seed {choice.seed}: legal are 0..2^63 - 1")
        return choice if choice.pick == "random" else TicketChoice(choice.size, choice.pick)

    def _first_words(self) -> str:
        """A prompt that fits the parent: how its validation text begins."""
        if self.evaluator is None or self.tokenizer is None:
            return "Once upon a time"
        text = self.evaluator.text
        ids = text.file.sequences([0], text.seq_len)[0].tolist()
        return " ".join(self.tokenizer.decode(ids).split()[:PROMPT_WORDS])


class _Writer:
    """One model that writes, with its cache."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, ids: list[int], temperature: float, seed: int
    ):
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.cache = DynamicCache()
        self.decoder = DecodeStream(
            ids[-8:], skip_special_tokens=True
        )  # a space may depend on them
        self.rng = torch.Generator().manual_seed(seed)
        self.ids, self.text, self.ended = torch.tensor([ids], device=model.device), "", False
        eos = getattr(model.generation_config, "eos_token_id", None)
        self.eos = set(eos if isinstance(eos, list) else [eos])

    def step(self) -> None:
        if self.ended:
            return
        out: Any = self.model(
            input_ids=self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        logits = out.logits[0, -1].float().cpu()
        values, tokens = logits.topk(min(TOP_K, len(logits)))
        chosen = 0
        if self.temperature > 0:
            shares = (values / self.temperature).softmax(-1)
            chosen = int(torch.multinomial(shares, 1, generator=self.rng))
        token = int(tokens[chosen])
        self.ids = torch.tensor([[token]], device=self.model.device)
        self.ended = token in self.eos
        if not self.ended and (piece := self.decoder.step(self.tokenizer, token)):
            self.text += piece


def _tokenizer(parent: Parent, source: str) -> Any:
    for place in (parent.tokenizer, source):
        if place is not None:
            try:
                return load_tokenizer(str(place))
            except ValueError:
                continue
    return None


def _known(parent: Parent, widths: Widths) -> str:
    """What the run's evaluation and its certificates say about random tickets of these widths."""
    run = Path(parent.source)
    run = run.parents[1] if run.name.startswith("round-") else run
    said = []
    metrics = run / "metrics.jsonl"
    rows = last_evaluation(metrics) if metrics.is_file() else None
    for ratio, found in (rows or {}).items():
        if ratio != "full" and _is_ratio(parent, ratio, widths):
            spread = f"{found['mean']:.2f} (worst of {found['n']}: {found['worst']:.2f})"
            said.append(f"random tickets {spread}")
    for path in sorted(run.glob("**/certificate.json")):
        made = json.loads(path.read_text())
        if _is_ratio(parent, made["spread"]["ratio"], widths):
            bound = made["bound"]
            said.append(f"certified: {bound['coverage']:.0%} of all are ≤ {bound['value']:.2f}")
    return "; ".join(said)


def _is_ratio(parent: Parent, ratio: str, widths: Widths) -> bool:
    try:
        return widths_of_ratio(parent.block_map, ratio) == widths
    except ValueError:
        return False

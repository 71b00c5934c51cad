"""The model behind the page: it holds a parent, cuts tickets in memory, measures them and writes with both."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import DynamicCache, PreTrainedModel

from ..compute import speed
from ..compute.perplexity import Text, perplexity
from ..model import generator, huggingface, masks
from ..model.blocks import Blueprint, Widths, widths_of_ratio
from ..model.tokenizer import load_tokenizer
from ..tickets import deploy, importance, stock
from ..tickets.budget import ladder, weights_bytes
from ..tickets.card import last_evaluation
from ..tickets.parent import Parent, open_parent
from ..tickets.score import text_of
from . import PICKS

N_TOKENS = 512  # of validation text behind a perplexity: a second for 135M parameters
N_DRAWS = 4  # of the best-of pick
MOST_PROMPT = 512  # tokens that are read of a prompt


@dataclass(frozen=True)
class Asked:
    """Which ticket: a rung of the ladder of sizes, how its blocks are picked, the seed of the draw."""

    size: int  # 1 is the smallest
    pick: str = PICKS[0]
    seed: int = 0


class Models:
    """A parent, the whole model and the ticket that was cut last."""

    def __init__(self, source: str, device: str, overrides: list[str], data: str | None):
        self.parent: Parent = open_parent(source, device, overrides)
        self.sizes: list[Widths] = ladder(self.parent.block_map)
        self.whole = deploy.cut_ticket(self.parent, self.parent.block_map.full())
        self.tokenizer = _tokenizer(self.parent, source)
        self.text, self.no_text = _text(self.parent, data)
        self.scores: Any = None  # of the nested pick: measured when it is first asked for
        self.measured: dict[Any, dict[str, Any]] = {}
        self.held: tuple[Asked, PreTrainedModel] | None = None

    def describe(self) -> Iterator[dict[str, Any]]:
        """What the page shows before anything is asked."""
        block_map = self.parent.block_map
        labels = []
        for widths in self.sizes:
            kept = {g.kind: f"{g.kind} {widths[g.name]}/{g.n_blocks}" for g in block_map.groups}
            labels.append(", ".join(kept.values()))
        yield {
            "source": self.parent.source,
            "family": self.parent.template.config.model_type,
            "sizes": labels,
            "parameters": [self._n_params(widths) for widths in self.sizes],
            "bands": [_band(self.parent, widths) for widths in self.sizes],
            "no_text": self.no_text,
            "no_tokenizer": self.tokenizer is None,
        }

    def cut(self, asked: Asked) -> Iterator[dict[str, Any]]:
        """What the whole model and a ticket cost, how fast they are, how good: each as soon as it is known."""
        asked = self._legal(asked)
        models = {"whole": (None, self.whole), "ticket": (asked, self.ticket(asked))}
        steps = [self._sizes, self._ms] + [self._perplexity] * (self.text is not None)
        for step in steps:
            for key, model in models.values():
                step(self.measured.setdefault(key, {}), model)
            yield {name: dict(self.measured[key]) for name, (key, _) in models.items()}

    def curve(self, pick: str, seed: int) -> Iterator[dict[str, Any]]:
        """Parameters, milliseconds and perplexity of every size, smallest first, as they come."""
        for size in range(1, len(self.sizes) + 1):
            *_, last = self.cut(Asked(size, pick, seed))
            yield {"size": size, **last["ticket"]}

    @torch.inference_mode()
    def write(
        self, asked: Asked, prompt: str, n_new: int, temperature: float, stops: Callable[[], bool]
    ) -> Iterator[dict[str, Any]]:
        """What the whole model and the ticket write after a prompt, token by token in turn."""
        asked = self._legal(asked)
        if self.tokenizer is None:
            raise ValueError(f"{self.parent.source} has no tokenizer: it can read no text")
        ids = self.tokenizer.encode(prompt[-100 * MOST_PROMPT :]).ids or [0]
        room = getattr(self.whole.config, "max_position_embeddings", None) or 1 << 20
        n_new = max(1, min(int(n_new), room // 2))
        kept = ids[-min(MOST_PROMPT, room - n_new) :]
        note = f"the last {len(kept):,} of {len(ids):,} tokens were read" * (len(kept) < len(ids))
        writers = {
            "whole": _Writer(self.whole, self.tokenizer, kept, temperature, asked.seed),
            "ticket": _Writer(self.ticket(asked), self.tokenizer, kept, temperature, asked.seed),
        }
        for _ in range(n_new):
            for writer in writers.values():
                writer.step()
            yield {
                "note": note,
                **{name: {"text": w.text, "ms": w.ms} for name, w in writers.items()},
            }
            if stops() or all(writer.ended for writer in writers.values()):
                return

    def _legal(self, asked: Asked) -> Asked:
        if asked.pick not in PICKS or not 1 <= asked.size <= len(self.sizes):
            raise ValueError(
                f"size {asked.size}, pick {asked.pick!r}: sizes are 1..{len(self.sizes)}, picks "
                f"{', '.join(PICKS)}"
            )
        return asked if asked.pick == PICKS[0] else Asked(asked.size, asked.pick)

    def ticket(self, asked: Asked) -> PreTrainedModel:
        """The ticket that was asked for, cut if it is not the last one."""
        if self.held is None or self.held[0] != asked:
            self.held = None  # room for the new one
            self.held = asked, deploy.cut_ticket(self.parent, self.blueprint(asked))
        return self.held[1]

    def blueprint(self, asked: Asked) -> Blueprint:
        """The same blocks for the same question; nested ones lie inside those of every larger size.

        Their order is the one that the parent was trained with, or else by the magnitude of their weights.
        """
        block_map, widths = self.parent.block_map, self.sizes[asked.size - 1]
        if asked.pick == PICKS[1]:
            if self.parent.progress.order:
                return masks.prefixes(block_map, self.parent.progress.order, widths)
            if self.scores is None:
                self.scores = importance.score(self.parent, "magnitude", None)
            return importance.keep_best(block_map, self.scores, widths)
        if asked.pick == PICKS[0]:
            return generator.for_deployment(block_map, widths, seed=asked.seed)
        if self.text is None:
            raise ValueError(f"the best of {N_DRAWS} is chosen by perplexity: {self.no_text}")
        drawn = list(generator.draws(block_map, widths, seed=asked.seed, n=N_DRAWS))
        found = [self._measure(deploy.cut_ticket(self.parent, each)) for each in drawn]
        return drawn[found.index(min(found))]

    def _sizes(self, found: dict[str, Any], model: PreTrainedModel) -> None:
        if "parameters" not in found:
            shapes = huggingface.shapes(model)
            found["parameters"] = sum(p.numel() for p in model.parameters())
            found["bytes"] = weights_bytes(shapes)
            found["stock"] = not isinstance(stock.stock_config(self.parent.template, shapes), str)

    def _ms(self, found: dict[str, Any], model: PreTrainedModel) -> None:
        if "ms" not in found:
            found["ms"] = speed.glance(model)

    def _perplexity(self, found: dict[str, Any], model: PreTrainedModel) -> None:
        if "perplexity" not in found:
            found["perplexity"] = self._measure(model)

    def _measure(self, model: PreTrainedModel) -> float:
        assert self.text is not None
        return perplexity(model, self.text, self.parent.cfg.train.precision)

    def _n_params(self, widths: Widths) -> int:
        return self.parent.central.layout.narrowed(self.parent.block_map, widths).n_params


class _Writer:
    """One model that writes, with its cache."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, ids: list[int], temperature: float, seed: int
    ):
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.cache, self.decoder = DynamicCache(), DecodeStream(skip_special_tokens=True)
        self.draw = torch.Generator().manual_seed(seed)
        self.ids, self.text, self.ended = torch.tensor([ids], device=model.device), "", False
        self.seconds: list[float] = []
        eos = getattr(model.generation_config, "eos_token_id", None)
        self.eos = set(eos if isinstance(eos, list) else [eos])

    @property
    def ms(self) -> float | None:
        """Of a decoded token, the prompt apart."""
        return 1000 * sum(self.seconds[1:]) / len(self.seconds[1:]) if self.seconds[1:] else None

    def step(self) -> None:
        if self.ended:
            return
        began = time.perf_counter()
        out: Any = self.model(
            input_ids=self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        logits = out.logits[0, -1].float().cpu()
        if self.temperature > 0:
            share = (logits / self.temperature).softmax(-1)
            token = int(torch.multinomial(share, 1, generator=self.draw))
        else:
            token = int(logits.argmax())
        self.seconds.append(time.perf_counter() - began)
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


def _text(parent: Parent, data: str | None) -> tuple[Text | None, str]:
    """What perplexities are measured on, or why there are none."""
    try:
        return text_of(parent, data, N_TOKENS), ""
    except ValueError as error:
        if data:
            raise
        return None, str(error)


def _band(parent: Parent, widths: Widths) -> str:
    """What the run's evaluation and its certificates say about random tickets of these widths."""
    run = Path(parent.source)
    run = run.parents[1] if run.name.startswith("round-") else run
    said = []
    metrics = run / "metrics.jsonl"
    rows = last_evaluation(metrics) if metrics.is_file() else None
    for ratio, found in (rows or {}).items():
        if ratio != "full" and _same(parent, ratio, widths):
            said.append(
                f"random tickets {found['mean']:.2f} (worst of {found['n']}: {found['worst']:.2f})"
            )
    for path in sorted(run.glob("**/certificate.json")):
        made = json.loads(path.read_text())
        if _same(parent, made["spread"]["ratio"], widths):
            bound = made["bound"]
            said.append(f"certified: {bound['coverage']:.0%} of all are ≤ {bound['value']:.2f}")
    return "; ".join(said)


def _same(parent: Parent, ratio: str, widths: Widths) -> bool:
    try:
        return widths_of_ratio(parent.block_map, ratio) == widths
    except ValueError:
        return False

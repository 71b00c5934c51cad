"""From a parent to a ticket: choose widths and blocks, cut, prove, write.

A budget says how wide, a pick says which blocks, a proof says what came out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..compute import speed
from ..compute.perplexity import Evaluator, perplexity
from ..model import huggingface
from ..model.blocks import KINDS, Blueprint, Shapes, Widths, widths_of_ratio
from ..model.families import n_cached
from ..model.generator import for_deployment
from ..model.subnet import add_means_, build
from ..system import manifest, terminal
from ..system.terminal import console, progress
from . import deploy, hf_folder, stock
from .budget import Costs, fit, impossible, predicted, weights_bytes
from .calibration import calibrate_on_tokens, check_calibration
from .parent import Parent, config_of, open_parent
from .pick import Pick, pick_blocks, pick_for
from .register import register
from .requests import TicketRequest
from .score import Scores, evaluator, score_model, text_of
from .sensitivity import MeasuredWidths, Sensitivity, measured_widths, n_losses, scores_for

# max |logit difference| to the masked parent, as a share of the largest logit (at least 1). Of
# SmolLM2's 34, float32 rounds off 2e-3 (float64: 0), and one wrong block in one layer makes 4.6
TOLERANCE = 1e-3
LONG = 10.0  # seconds of measurement that are announced


@dataclass(frozen=True)
class Ticket:
    """A dense model that was cut out of a parent; `save` writes it as a Hugging Face folder."""

    parent: Parent
    blueprint: Blueprint
    model: PreTrainedModel
    """For `generate`, `to` and whatever else transformers offers."""
    proof: dict[str, Any]
    """What was measured: parameters, bytes, speed, perplexity, the budget asked and spent."""
    request: TicketRequest

    def __repr__(self) -> str:
        proof, block_map = self.proof, self.parent.block_map
        widths, total = block_map.widths(self.blueprint), block_map.full_widths()
        said = [f"{proof['n_params']:,} of {proof['parent']['n_params']:,} parameters"]
        for kind in KINDS:
            if names := [group.name for group in block_map.groups if group.kind == kind]:
                kept, n = (sum(each[name] for name in names) for each in (widths, total))
                said.append(f"{kept} of {n} {kind} blocks")
        if found := proof.get("perplexity"):
            said.append(f"perplexity {found['ticket']:.2f}")
        return f"Ticket({', '.join(said)})"

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The parent's tokenizer, which `save` writes beside the model; None where it has none."""
        return hf_folder.parent_tokenizer(self.parent)

    def evaluate(self, data: str | Path | None = None, tokens: int | None = None) -> Scores:
        """The ticket's perplexity, on the text that it was measured on unless another is named."""
        stem = self.request.data if data is None else str(data)
        text = text_of(self.parent, stem, self.request.tokens if tokens is None else tokens)
        return score_model(self.model, text, "ticket", self.parent.cfg.train.precision)

    def save(self, folder: str | Path) -> Path:
        """Write the folder, with the proof in ticket.json; transformers can load it from now on."""
        check_target(Path(folder))
        deploy.save_model(self.parent, self.blueprint, self.model, Path(folder), self.proof)
        register()
        return Path(folder)


def write_tickets(
    source: str | Path,
    out: Path,
    request: TicketRequest,
    device: str = "auto",
    overrides: Sequence[str] = (),
) -> Iterator[tuple[Path, Ticket]]:
    """Open a parent and write a ticket for each budget, with its proof in ticket.json.

    What can be refused without the model is refused before it is loaded.
    """
    requests = request.each()
    folders = [out / each.budget.slug for each in requests] if len(requests) > 1 else [out]
    for folder in folders:
        check_target(folder)
    check_early(source, request, overrides)
    parent = open_parent(source, device, overrides)
    for folder, each in zip(folders, requests, strict=True):
        yield folder, write(parent, folder, each)


def write(parent: Parent, folder: Path, request: TicketRequest, quiet: bool = False) -> Ticket:
    """Write the ticket that a budget buys."""
    with progress(quiet) as bar:
        ticket = choose(parent, request, bar)
        task = bar.add_task("write", total=1, note="")
        ticket.save(folder)
        bar.advance(task)
    return ticket


def check_early(source: str | Path, request: TicketRequest, overrides: Sequence[str]) -> None:
    """Refuse what a parent's config forbids, before its weights are loaded."""
    cfg, how = config_of(source, overrides), request.how
    if cfg is None:  # it is no checkpoint: opening it says why
        return
    if how.needs_calibration:
        check_calibration(str(source), cfg, request.data)
    if request.stock and (cfg.blocks.shared_first or cfg.blocks.shared_last):
        raise ValueError(f"--stock: {stock.shared_layers(cfg.blocks)}")


def check_target(folder: Path) -> None:
    """An earlier ticket or an empty folder is replaced; anything else is left alone."""
    why = ""
    if (folder / deploy.TICKET).is_file():
        try:  # somebody's own ticket.json does not make the files beside it ours
            manifest.vouched(folder / deploy.TICKET, deploy.read_ticket(folder))
            return
        except ValueError as error:
            why = f" ({error})"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out {folder} exists and is no ticket{why}: choose another folder")
    above = next(path for path in folder.absolute().parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = "cannot be written to" if above.is_dir() else "is no folder"
        raise ValueError(f"--out {folder}: {above} {what}: choose another folder")


def choose(parent: Parent, request: TicketRequest, bar: Progress) -> Ticket:
    """Fit the budget, pick the blocks, cut the ticket and measure it; nothing is written."""
    how, budget = pick_for(parent, request.how), request.budget
    ready = _evaluator(parent, request)
    calibration = None
    if how.needs_calibration:
        calibration = calibrate_on_tokens(parent, request.data, request.tokens, request.seed)
    costs, candidates, measured = _choose_widths(parent, request, how, bar)
    dtype = getattr(torch, request.dtype)
    central = parent.central
    whole = build(parent.template, parent.block_map, central.layout, central.weights, gates="none")
    full = whole.model.to(dtype)  # timed beside the ticket
    for widths in candidates:
        blueprint, based_on = pick_blocks(
            parent,
            widths,
            how,
            seed=request.seed,
            evaluator=ready,
            calibration=calibration,
            bar=bar,
        )
        task = bar.add_task("check and time", total=2, note="")
        model = deploy.cut_ticket(parent, blueprint)
        difference = logit_difference(parent, blueprint, model)
        bar.update(task, advance=1, note=f"max |Δlogit| {difference:.1e}")
        took, of_parent = speed.measure_all([model.to(dtype), full])
        bar.update(task, advance=1, note=f"{took.decode_ms:.2f} ms per token")
        if budget.kind != "latency" or took.decode_ms <= budget.limit:
            break
    else:  # the machine was quicker while the budget was fitted
        raise impossible(budget, took.decode_ms, "ms")
    shapes = huggingface.shapes(model)
    n_params = sum(param.numel() for param in model.parameters())
    n_bytes = weights_bytes(shapes, request.dtype)
    asked: dict[str, Any] = {"kind": budget.kind, "asked": budget.asked}
    if budget.kind != "ratio":  # which is met by construction
        spent = {"params": n_params, "size": n_bytes, "latency": took.decode_ms}
        spent["memory"] = costs.memory(widths, budget.context)
        asked |= {"limit": budget.limit, "spent": spent[budget.kind]}
    if budget.context:
        asked["context"] = budget.context
    by_loss = measured if measured is not None and widths == measured.widths else None
    proof: dict[str, Any] = {
        "parent": {
            "source": parent.source,
            "n_params": central.layout.n_params,
            "bytes": weights_bytes(huggingface.shapes(parent.template), request.dtype),
            "speed": asdict(of_parent),
        },
        "budget": asked,
        "pick": {"how": how.asked, "seed": request.seed, **based_on},
        "spend": by_loss.to_dict() if by_loss else {"how": "even"},
        "whole": widths == parent.block_map.full_widths(),
        "n_params": n_params,
        "bytes": n_bytes,
        "dtype": request.dtype,
        "stock": stock.described(parent.template, shapes),
        "max_logit_difference": difference,
        "speed": asdict(took),
    }
    if ready is not None:
        proof["perplexity"] = _perplexity(model, ready, bar)
    return Ticket(parent, blueprint, model, proof, request)


def _evaluator(parent: Parent, request: TicketRequest) -> Evaluator | None:
    """What perplexity is measured on; a parent whose own tokens are gone goes without."""
    try:
        return evaluator(parent, request.data, request.tokens)
    except ValueError as error:
        if request.data or request.how.needs_perplexity:
            raise
        console.print(f"no perplexity: {error}")
        return None


def _perplexity(model: PreTrainedModel, ready: Evaluator, bar: Progress) -> dict[str, Any]:
    task = bar.add_task("perplexity", total=2, note="")
    ticket = perplexity(model, ready.text, ready.precision, ready.loss)
    bar.update(task, advance=1, note=f"{ticket:.2f}")
    full, text = ready.full_perplexity(), ready.text
    bar.advance(task)
    n_tokens = text.n_sequences * text.seq_len
    return {"ticket": ticket, "parent": full, "data": text.file.stem, "n_tokens": n_tokens}


def _choose_widths(
    parent: Parent, request: TicketRequest, how: Pick, bar: Progress
) -> tuple[Costs, list[Widths], MeasuredWidths | None]:
    """What subnets cost, and widths that the budget buys: the best first, smaller ones after it.

    Measured losses decide where even widths leave a choice.
    """
    budget, block_map = request.budget, parent.block_map
    most = getattr(parent.template.config, "max_position_embeddings", None)
    if most is not None and budget.context > most:
        raise ValueError(f"--context {budget.context}: {parent.source} has {most} positions")
    clock = bar.add_task("measure ms per token", total=None, note="", visible=False)
    timed: list[float] = []

    def milliseconds(widths: Widths) -> float:
        some = for_deployment(block_map, widths, seed=0)  # any blocks: equal shapes
        model = deploy.cut_ticket(parent, some).to(getattr(torch, request.dtype))
        timed.append(speed.measure_all([model])[0].decode_ms)
        bar.update(clock, advance=1, note=f"{timed[-1]:.2f} ms", visible=True)
        return timed[-1]

    def cached(shapes: Shapes, context: int) -> int:
        return n_cached(parent.template, shapes, context)

    legal = None
    if request.stock:
        asked = widths_of_ratio(block_map, budget.asked) if budget.kind == "ratio" else None
        legal = stock.demand(parent, asked)
    costs = Costs(block_map, parent.central.layout.shapes, request.dtype, milliseconds, cached)
    even = fit(budget, costs, legal)
    is_open = budget.kind != "ratio" and not request.stock and even[0] != block_map.full_widths()
    measured = None
    if is_open and request.spend == "measured":
        measured = _where_it_hurts_least(parent, request, how, costs, even[0], bar)
    bar.update(clock, total=len(timed))  # the bisection is over: it never knew how many
    better = [] if measured is None or measured.widths in even else [measured.widths]
    return costs, better + even, measured


def _where_it_hurts_least(
    parent: Parent, request: TicketRequest, how: Pick, costs: Costs, even: Widths, bar: Progress
) -> MeasuredWidths | None:
    """Widths by measured sensitivity; None, with the reason printed, where there is no text."""
    budget, block_map = request.budget, parent.block_map
    try:
        text = calibrate_on_tokens(parent, request.data, request.tokens, request.seed)
    except ValueError as error:
        console.print(f"the budget is spent evenly: {error}")
        return None
    n = n_losses(block_map)
    task = bar.add_task("sensitivity", total=n, note="")
    sensitivity = Sensitivity(parent, text.ids, scores_for(parent, how, text.ids, request.seed))
    began = time.monotonic()
    first = sensitivity.loss(even)
    seconds = n * (time.monotonic() - began)
    if seconds > LONG:
        span = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
        console.print(
            f"measuring what each layer is worth: up to {n} losses, about {span}; --spend even "
            "needs none of them, fewer --tokens less time"
        )

    def loss(widths: Widths) -> float:
        found = first if widths == even else sensitivity.loss(widths)
        bar.update(task, advance=1, note=f"loss {found:.3f}")
        return found

    cost = predicted(costs, even) if budget.kind == "latency" else costs.of(budget)[0]
    found = measured_widths(block_map, even, budget.limit, cost, loss)
    bar.update(task, completed=n)
    return found


@torch.no_grad()
def logit_difference(parent: Parent, blueprint: Blueprint, model: PreTrainedModel) -> float:
    """max |logit of the ticket - logit of the masked and scaled parent| on random tokens."""
    block_map, central = parent.block_map, parent.central
    weights, factors = central.weights, parent.scales(block_map.widths(blueprint))
    if parent.means:
        weights = weights.clone()
        add_means_(central.layout.views(weights), block_map, blueprint, factors, parent.means)
    masked = build(parent.template, block_map, central.layout, weights, gates="all")
    masked.keep_(blueprint, factors)
    shape = (2, min(64, parent.cfg.data.seq_len))
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(huggingface.vocab_size(parent.template), shape, generator=draw)
    ids = ids.to(central.weights.device)
    ours, theirs = (m(input_ids=ids, use_cache=False).logits for m in (model, masked.model))
    difference = float((ours - theirs).abs().max())
    allowed = TOLERANCE * max(1.0, float(theirs.abs().max()))
    if not difference <= allowed:  # a NaN is no proof either
        raise FloatingPointError(
            f"the ticket's logits differ from the masked parent's by {difference:.2g} (at most "
            f"{allowed:.2g} is rounding): nothing was written"
        )
    return difference


def kind_of(ticket: Ticket) -> str:
    """What can load it, in half a sentence."""
    found, family = ticket.proof["stock"], ticket.parent.template.config.model_type
    if isinstance(found, str):
        return (
            "which transformers loads after twistlm.register() or with trust_remote_code=True "
            f"(not a stock {family} model: {found})"
        )
    return f"a stock {family} model: whatever loads {family} loads it, without twistlm"


def table(ticket: Ticket) -> Table:
    """The proof in a few lines."""
    proof, whole, took = ticket.proof, ticket.proof["parent"], ticket.proof["speed"]
    asked = proof["budget"]
    title = f"--{asked['kind']} {asked['asked']} --pick {proof['pick']['how']}"
    result = terminal.table(title, "", "ticket", "parent")
    result.add_row("parameters", f"{proof['n_params']:,}", f"{whole['n_params']:,}")
    sizes = (f"{found['bytes']:,}" for found in (proof, whole))
    result.add_row(f"bytes of weights ({proof['dtype']})", *sizes)
    if found := proof.get("perplexity"):
        name = f"perplexity on {found['n_tokens']:,} tokens"
        result.add_row(name, f"{found['ticket']:.2f}", f"{found['parent']:.2f}")
    for name, key in (
        ("ms per decoded token", "decode_ms"),
        (f"ms for a prompt of {took['n_prompt']} tokens", "prefill_ms"),
    ):
        result.add_row(name, f"{took[key]:.2f}", f"{whole['speed'][key]:.2f}")
    result.add_row("max |Δlogit| to the masked parent", f"{proof['max_logit_difference']:.1e}", "")
    for kind in KINDS:
        groups = [group for group in ticket.parent.block_map.groups if group.kind == kind]
        if groups:
            each = [len(ticket.blueprint[group.name]) for group in groups]
            kept = " ".join(map(str, each))
            if len(set(each)) == 1:
                kept = f"{each[0]} in each of {len(each)} layers"
            result.add_row(f"{kind} blocks in cut layers", kept, f"{groups[0].n_blocks}")
    return result

"""Choose a ticket: a budget says how wide, a pick says which blocks, a proof says what came out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table
from transformers import PreTrainedModel

from ..compute import speed
from ..compute.perplexity import Evaluator, perplexity
from ..compute.speed import Speed
from ..model import huggingface
from ..model.blocks import KINDS, Blueprint, Shapes, Widths, widths_of_ratio
from ..model.families import n_cached
from ..model.generator import for_deployment
from ..model.subnet import add_means_, build
from ..system import manifest, terminal
from ..system.terminal import console, progress
from . import deploy, stock
from .budget import Budget, Costs, fit, impossible, predicted, weights_bytes
from .calibration import calibrate_on_tokens
from .parent import Parent
from .pick import Basis, pick_blocks, pick_for
from .requests import TicketRequest
from .score import evaluator
from .sensitivity import Sensitivity, Spent, n_losses, scores_for, spend

# max |logit difference| to the masked parent, as a share of the largest logit (at least 1). Of SmolLM2's
# 34, float32 rounds off 2e-3 (float64: 0), and one wrong block in one layer makes 4.6
TOLERANCE = 1e-3


@dataclass(frozen=True)
class ProvenTicket:
    """An extracted ticket with what was measured of it: `model` itself, so that this is what gets written."""

    parent: Parent
    blueprint: Blueprint
    model: PreTrainedModel
    proof: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write the ticket's folder, with the proof in ticket.json."""
        check_target(folder)
        deploy.save_model(self.parent, self.blueprint, self.model, folder, self.proof)


def write(
    parent: Parent, folder: Path, request: TicketRequest, quiet: bool = False
) -> ProvenTicket:
    """Write the ticket that a budget buys, with its proof in ticket.json."""
    check_target(folder)
    with progress(quiet) as bar:
        ticket = choose(parent, request, bar)
        task = bar.add_task("write", total=1, note="")
        ticket.save(folder)
        bar.advance(task)
    return ticket


def choose(parent: Parent, request: TicketRequest, bar: Progress) -> ProvenTicket:
    """Fit the budget, pick the blocks, extract the ticket and measure it; nothing is written."""
    how, budget = pick_for(parent, request.how), request.budget
    ready = _text(parent, request)
    basis = Basis(
        seed=request.seed,
        evaluator=ready,
        calibration=calibrate_on_tokens(parent, request.data, request.tokens, request.seed)
        if how.needs_calibration
        else None,
    )
    costs, even = _fit(parent, request, bar)
    spent = None
    if budget.kind != "ratio" and request.spend == "measured" and not request.stock:
        spent = _where_it_hurts_least(parent, replace(request, pick=how.asked), costs, even[0], bar)
    better = [] if spent is None or spent.widths in even else [spent.widths]
    dtype = getattr(torch, request.dtype)
    whole = deploy.cut_ticket(parent, parent.block_map.full())  # timed beside the ticket
    for widths in better + even:
        blueprint, based_on = pick_blocks(parent, widths, how, basis, bar)
        task = bar.add_task("check and time", total=2, note="")
        model = deploy.cut_ticket(parent, blueprint)
        difference = logit_difference(parent, blueprint, model)
        bar.update(task, advance=1, note=f"max |Δlogit| {difference:.1e}")
        models = [model.to(dtype), whole.to(dtype)]
        measured, of_parent = speed.measure_all(models)
        bar.update(task, advance=1, note=f"{measured.decode_ms:.2f} ms per token")
        if budget.kind != "latency" or measured.decode_ms <= budget.limit:
            break
    else:  # the machine was quicker while the budget was fitted
        raise impossible(budget, measured.decode_ms, "ms")
    n_params = sum(param.numel() for param in model.parameters())
    n_bytes = weights_bytes(huggingface.shapes(model), request.dtype)
    n_memory = costs.memory(widths, budget.context)
    proof: dict[str, Any] = {
        "parent": {"source": parent.source, "n_params": parent.central.layout.n_params},
        "budget": _spent(budget, n_params, n_bytes, n_memory, measured),
        "pick": {"how": how.asked, "seed": request.seed, **based_on},
        "spend": {"how": "even"} if spent is None or widths != spent.widths else spent.to_dict(),
        "whole": widths == parent.block_map.full_widths(),
        "n_params": n_params,
        "bytes": n_bytes,
        "dtype": request.dtype,
        "stock": stock.described(parent.template, huggingface.shapes(model)),
        "max_logit_difference": difference,
        "speed": asdict(measured),
    }
    proof["parent"] |= {
        "bytes": weights_bytes(huggingface.shapes(parent.template), request.dtype),
        "speed": asdict(of_parent),
    }
    if ready is not None:
        proof["perplexity"] = _perplexity(model, ready, bar)
    return ProvenTicket(parent, blueprint, model, proof)


def _spent(
    budget: Budget, n_params: int, n_bytes: int, n_memory: int, measured: Speed
) -> dict[str, Any]:
    """The budget beside what the ticket takes of it; a ratio is met by construction."""
    asked: dict[str, Any] = {"kind": budget.kind, "asked": budget.asked}
    spent = {"params": n_params, "size": n_bytes, "latency": measured.decode_ms}
    spent |= {"memory": n_memory} if budget.kind == "memory" else {}
    if budget.kind in spent:
        asked |= {"limit": budget.limit, "spent": spent[budget.kind]}
    if budget.context:
        asked["context"] = budget.context
    return asked


def _fit(parent: Parent, request: TicketRequest, bar: Progress) -> tuple[Costs, list[Widths]]:
    """What subnets cost, and even widths that the budget buys; for a latency smaller ones follow."""
    budget, dtype = request.budget, request.dtype
    most = getattr(parent.template.config, "max_position_embeddings", None)
    if most is not None and budget.context > most:
        raise ValueError(f"--context {budget.context}: {parent.source} has {most} positions")
    if budget.kind == "latency":
        task = bar.add_task("measure ms per token", total=None, note="")
    n_measured = 0

    def milliseconds(widths: Widths) -> float:
        nonlocal n_measured
        some = for_deployment(parent.block_map, widths, seed=0)  # any blocks: equal shapes
        model = deploy.cut_ticket(parent, some)
        took = speed.measure(model.to(getattr(torch, dtype))).decode_ms
        n_measured += 1
        bar.update(task, advance=1, note=f"{took:.2f} ms")
        return took

    def cached(shapes: Shapes, context: int) -> int:
        return n_cached(parent.template, shapes, context)

    shapes = parent.central.layout.shapes
    legal = None
    if request.stock:
        asked = widths_of_ratio(parent.block_map, budget.asked) if budget.kind == "ratio" else None
        legal = stock.demand(parent, asked)
    costs = Costs(parent.block_map, shapes, dtype, milliseconds, cached)
    found = fit(budget, costs, legal)
    if n_measured:
        bar.update(task, total=n_measured)  # the bisection is over: it never knew how many
    return costs, found


def _where_it_hurts_least(
    parent: Parent, request: TicketRequest, costs: Costs, even: Widths, bar: Progress
) -> Spent | None:
    """Widths by measured sensitivity; None, and the reason printed, where there is no text for it."""
    budget, how = request.budget, request.how
    try:
        text = calibrate_on_tokens(parent, request.data, request.tokens, request.seed)
    except ValueError as error:
        console.print(f"the budget is spent evenly: {error}")
        return None
    task = bar.add_task("sensitivity", total=n_losses(parent.block_map), note="")
    scores = scores_for(parent, how, text.ids, request.seed)
    sensitivity = Sensitivity(parent, text.ids, scores)

    def loss(widths: Widths) -> float:
        found = sensitivity.loss(widths)
        bar.update(task, advance=1, note=f"loss {found:.3f}")
        return found

    cost = predicted(costs, even) if budget.kind == "latency" else costs.of(budget)[0]
    spent = spend(parent.block_map, even, budget.limit, cost, loss)
    bar.update(task, completed=n_losses(parent.block_map))
    return spent


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


def _text(parent: Parent, request: TicketRequest) -> Evaluator | None:
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
    full = ready.full_perplexity()
    bar.advance(task)
    text = ready.text
    n_tokens = text.n_sequences * text.seq_len
    return {"ticket": ticket, "parent": full, "data": text.file.stem, "n_tokens": n_tokens}


def kind_of(ticket: ProvenTicket) -> str:
    """What can load it, in half a sentence."""
    found, family = ticket.proof["stock"], ticket.parent.template.config.model_type
    if isinstance(found, str):
        return f"loaded with twistlm or trust_remote_code (not a stock {family} model: {found})"
    return f"a stock {family} model: whatever loads {family} loads it, without twistlm"


def table(ticket: ProvenTicket) -> Table:
    """The proof in a few lines."""
    parent, proof = ticket.parent, ticket.proof
    asked, took = proof["budget"], proof["speed"]
    title = f"--{asked['kind']} {asked['asked']} --pick {proof['pick']['how']}"
    result = terminal.table(title, "", "ticket", "parent")
    result.add_row("parameters", f"{proof['n_params']:,}", f"{proof['parent']['n_params']:,}")
    whole = proof["parent"]
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
        groups = [group for group in parent.block_map.groups if group.kind == kind]
        if groups:
            each = [len(ticket.blueprint[group.name]) for group in groups]
            kept = " ".join(map(str, each))
            if len(set(each)) == 1:
                kept = f"{each[0]} in each of {len(each)} layers"
            result.add_row(f"{kind} blocks in cut layers", kept, f"{groups[0].n_blocks}")
    return result

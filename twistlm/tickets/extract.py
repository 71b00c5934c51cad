"""From a parent to a ticket: choose widths and blocks, cut, prove, write.

A budget says how wide, a pick says which blocks, a proof says what came out.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..compute import speed
from ..compute.perplexity import perplexity
from ..fields import python_words
from ..model import huggingface
from ..model.blocks import Blueprint
from ..model.subnet import add_means_
from ..system import manifest, terminal
from ..system.terminal import console, progress
from . import deploy
from .hf_folder import numbers, parent_tokenizer
from .importance import NESTED, NEURONS, parse_pick, pick_blocks, pick_for, with_sorted_neurons
from .parent import Parent, config_of, open_parent
from .register import register
from .requests import Budget, ScoreRequest, TicketRequest
from .score import Scores, score_model, whole_windows
from .spend import choose_widths, ticket_cost
from .stock import refuse_shared
from .text import calibrate_on_tokens, open_text, text_of
from .widths import weights_bytes

# max |logit difference| to the masked parent, as a share of the largest logit (at least 1). Of
# SmolLM2's 34, float32 rounds off 2e-3 (float64: 0), and one wrong block in one layer makes 4.6
TOLERANCE = 1e-3


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
        proof = self.proof
        said = [f"{proof['n_params']:,} of {proof['parent']['n_params']:,} parameters"]
        for kind, kept, n_blocks in self.kept():
            said.append(f"{sum(kept)} of {len(kept) * n_blocks} {kind} blocks")
        if found := proof.get("perplexity"):
            said.append(f"perplexity {found['ticket']:.2f}")
        return f"Ticket({', '.join(said)})"

    def kept(self) -> Iterator[tuple[str, list[int], int]]:
        """Each kind, the blocks that its cut layers keep, and how many each layer had."""
        block_map = self.parent.block_map
        for kind in block_map.kinds:
            kept = [len(self.blueprint[g.name]) for g in block_map.groups if g.kind == kind]
            yield kind, kept, block_map.n_blocks(kind)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The parent's tokenizer, which `save` writes beside the model; None where it has none."""
        return parent_tokenizer(self.parent)

    @python_words()
    def evaluate(self, data: str | Path | None = None, tokens: int | None = None) -> Scores:
        """The ticket's perplexity, on the text that it was measured on unless another is named."""
        stem = self.request.data if data is None else str(data)
        n_tokens = self.request.tokens if tokens is None else ScoreRequest(tokens=tokens).tokens
        text = text_of(self.parent, stem, n_tokens)
        text = text if tokens is None else whole_windows(text)
        return score_model(self.model, text, "ticket", self.parent.cfg.train.precision)

    @python_words()
    def save(self, folder: str | Path) -> Path:
        """Write the folder, with the proof in ticket.json; transformers can load it from now on."""
        check_target(Path(folder))
        deploy.save_ticket(self.parent, self.blueprint, Path(folder), self.proof, self.model)
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
    budgets = request.budgets
    folders = [out / each.slug for each in budgets] if len(budgets) > 1 else [out]
    for folder in folders:
        check_target(folder)
    cfg = config_of(source, overrides)
    if cfg is not None and parse_pick(request.pick).needs_calibration:
        open_text(str(source), cfg, request.data, "train")
    if cfg is not None and request.stock:
        refuse_shared(cfg.blocks)
    parent = open_parent(source, device, overrides)
    for folder, ticket in zip(folders, make_tickets(parent, request, budgets), strict=True):
        ticket.save(folder)
        yield folder, ticket


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


def make_ticket(parent: Parent, request: TicketRequest, quiet: bool = False) -> Ticket:
    """Fit the one budget, pick the blocks, cut the ticket and measure it; nothing is written."""
    return next(make_tickets(parent, request, [request.budget], quiet))


def make_tickets(
    parent: Parent, request: TicketRequest, budgets: Sequence[Budget], quiet: bool = False
) -> Iterator[Ticket]:
    """A ticket of each budget; all of them are fitted before the first one comes."""
    how = pick_for(parent, request.pick)
    picked_by: dict[str, Any] = {"how": how.asked, "seed": request.seed}
    if how == NEURONS:
        read = calibrate_on_tokens(parent, request.data, request.tokens, request.seed)
        with progress(quiet) as bar:
            parent = with_sorted_neurons(parent, read.ids, bar)
        how, picked_by = NESTED, picked_by | read.to_dict()
    text = calibration = None
    try:
        text = text_of(parent, request.data, request.tokens)
    except ValueError as error:  # a parent whose own tokens are gone goes without
        if request.data or how.n_draws > 1:
            raise
        console.print(f"no perplexity: {error}")
    if how.needs_calibration:
        calibration = calibrate_on_tokens(parent, request.data, request.tokens, request.seed)
    with progress(quiet) as bar:
        fitted = [choose_widths(parent, request, each, how, bar) for each in budgets]
    for budget, candidates in zip(budgets, fitted, strict=True):
        evaluator = None if text is None else parent.evaluator(text)
        dtype, is_timed = getattr(torch, request.dtype), budget.kind == "latency"
        with progress(quiet) as bar:
            full = huggingface.rounded_(parent.whole(gates="none").model, dtype)
            picked = request.seed, evaluator, calibration, bar
            for widths, spend in candidates:  # noqa: B007
                blueprint, based_on = pick_blocks(parent, widths, how, *picked)
                model = deploy.cut_ticket(parent, blueprint)
                difference = logit_difference_(parent, blueprint, model, dtype)
                took, of_parent = speed.measure_all([model, full])
                is_late = is_timed and took.decode_ms > budget.limit
                if not is_late:
                    break
            if is_late:  # the machine was quicker while the budget was fitted
                raise budget.impossible(took.decode_ms)
        asked: dict[str, Any] = {"kind": budget.kind, "asked": budget.asked}
        if budget.kind != "ratio":  # which is met by construction
            cost = ticket_cost(parent, budget, request.dtype)
            spent = took.decode_ms if is_timed else cost(widths)
            asked |= {"limit": budget.limit, "spent": spent}
        if budget.context:
            asked["context"] = budget.context
        proof: dict[str, Any] = {
            "parent": {
                "source": parent.source,
                "n_params": parent.central.layout.n_params,
                "bytes": weights_bytes(huggingface.shapes(parent.template), request.dtype),
                "speed": asdict(of_parent),
            },
            "budget": asked,
            "pick": picked_by | based_on,
            "spend": spend,
            "whole": widths == parent.block_map.full_widths(),
            "n_params": model.num_parameters(),
            "bytes": weights_bytes(huggingface.shapes(model), request.dtype),
            "dtype": request.dtype,
            "max_logit_difference": difference,
            "speed": asdict(took),
        }
        if evaluator is not None:
            text, found = evaluator.text, {}
            for who, each in {"ticket": model, "parent": full}.items():
                found[who] = perplexity(each, text, evaluator.precision, evaluator.loss)
                check_finite(found[who], who, dtype)
            on = {"data": text.file.stem, "n_tokens": text.n_tokens, "seq_len": text.seq_len}
            proof["perplexity"] = {**found, **on}
        yield Ticket(parent, blueprint, model, proof, request)


@torch.no_grad()
def logit_difference_(
    parent: Parent, blueprint: Blueprint, model: PreTrainedModel, dtype: torch.dtype
) -> float:
    """max |logit of the ticket in `dtype` - logit of the masked and scaled parent|.

    Before it is rounded to `dtype` they must be alike: rounding would hide a wrong cut.
    """
    block_map, weights = parent.block_map, parent.central.weights.clone()
    factors = parent.scales(block_map.widths(blueprint))
    views = parent.central.layout.views(weights)
    add_means_(views, block_map, blueprint, factors, parent.means)
    masked = parent.whole(weights, gates="all")
    masked.keep_(blueprint, factors)
    shape = (2, min(64, parent.cfg.data.seq_len))
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(huggingface.vocab_size(parent.template), shape, generator=draw)
    ids = ids.to(weights.device)
    theirs = masked.model(input_ids=ids, use_cache=False).logits
    difference = float((model(input_ids=ids, use_cache=False).logits - theirs).abs().max())
    allowed = TOLERANCE * max(1.0, float(theirs.abs().max()))
    if not difference <= allowed:  # a NaN is no proof either
        raise FloatingPointError(
            f"the ticket's logits differ from the masked parent's by {difference:.2g} (at most "
            f"{allowed:.2g} is rounding): nothing was written"
        )
    if dtype != torch.float32:
        ours = huggingface.rounded_(model, dtype)(input_ids=ids, use_cache=False).logits
        difference = float((ours - theirs).abs().max())
    check_finite(difference, "ticket", dtype)
    return difference


def check_finite(number: float, who: str, dtype: torch.dtype) -> None:
    """A model that overflows in the dtype it would be written in is no ticket."""
    if not math.isfinite(number):
        raise ValueError(
            f"--dtype {str(dtype).removeprefix('torch.')}: the {who}'s logits are not finite in "
            "it (bfloat16 and float32 hold larger numbers than float16): nothing was written"
        )


def loaded_by(folder: Path) -> str:
    """What can load a ticket, in half a sentence."""
    family = manifest.read_json(folder / "config.json")["model_type"]
    if (why := deploy.read_ticket(folder)["stock"]) is not True:
        return (
            "which transformers loads after twistlm.register() or with trust_remote_code=True "
            f"(not a stock {family} model: {why})"
        )
    return f"a stock {family} model: whatever loads {family} loads it, without twistlm"


def table(ticket: Ticket) -> Table:
    """The proof in a few lines."""
    asked, pick = ticket.proof["budget"], ticket.proof["pick"]
    title = f"--{asked['kind']} {asked['asked']} --pick {pick['how']}"
    result = terminal.table(title, "", "ticket", "parent")
    for row in numbers(ticket.proof):
        result.add_row(*row)
    for kind, each, n_blocks in ticket.kept():
        kept = " ".join(map(str, each))
        if len(set(each)) == 1:
            kept = f"{each[0]} in each of {len(each)} layers"
        result.add_row(f"{kind} blocks in cut layers", kept, f"{n_blocks}")
    return result

"""`twistlm lab bench depth`: tickets of equal parameters by depth, by width and by both."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from ...compute import speed
from ...system import terminal
from ...system.provenance import describe_run
from ...tickets import extract
from ...tickets.parent import Parent
from ...tickets.requests import TicketRequest
from . import DepthRequest

REPEATS = 5  # runs behind a time, all models in turn


def bench(parent: Parent, request: DepthRequest, *, quiet: bool = False) -> dict[str, Any]:
    """For each number of layers a ticket of whole layers, and two others of as many parameters.

    One keeps all layers, the other is free; their blocks go where losing them costs the most loss.
    """
    n_layers = parent.template.config.num_hidden_layers
    text: dict[str, Any] = {"data": request.data, "tokens": request.tokens, "seed": request.seed}

    def cut(**asked: Any) -> extract.Ticket:
        return extract.make_ticket(parent, TicketRequest(**asked, **text), quiet=quiet)

    tickets = [("whole", cut(ratio="1"))]
    for n in request.layers or (3 * n_layers // 4, n_layers // 2):
        tickets += [("depth", cut(layers=n))]
        same = tickets[-1][1].proof["n_params"]
        tickets += [("width", cut(params=same, layers=n_layers)), ("both", cut(params=same))]
    times, rows = speed.measure_all([ticket.model for _, ticket in tickets], REPEATS), []
    for (how, ticket), took in zip(tickets, times, strict=True):
        row = {"cut": how, "n_params": ticket.proof["n_params"]}
        row["n_layers"] = ticket.model.config.num_hidden_layers
        row["blocks"] = {kind: kept for kind, kept, _ in ticket.kept()}
        row["perplexity"] = ticket.proof["perplexity"]["ticket"]
        rows.append(row | {"speed": asdict(took)})
    return {"source": parent.source, "rows": rows, "run": describe_run()}


def table(made: dict[str, Any]) -> Table:
    took = made["rows"][0]["speed"]
    title = f"{made['source']}: {took['device']}, {took['n_threads']} threads"
    heads = ("parameters", "layers", "attn blocks", "ffn blocks", "perplexity")
    result = terminal.table(title, "cut by", *heads, "ms a token", f"ms for {took['n_prompt']}")
    for row in made["rows"]:
        kept = (" ".join(map(str, each)) for each in row["blocks"].values())
        ms = (f"{row['speed'][key]:.2f}" for key in ("decode_ms", "prefill_ms"))
        head = (row["cut"], f"{row['n_params']:,}", str(row["n_layers"]))
        ends = row["cut"] in ("whole", "both")
        result.add_row(*head, *kept, f"{row['perplexity']:.2f}", *ms, end_section=ends)
    return result

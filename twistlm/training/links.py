"""What the busiest link carries in a round, and how long: hub, sharded and data parallel.

A link is busy in one direction at a time through a hub (all parcels out, then all results in), and in
both at once in an all-to-all or a ring; so bytes / speed are seconds for all three:

    hub      S (down + up)
    sharded  (S - 1) / S (down + up)
    ddp      2 (S - 1) / S M, in every local step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from rich.table import Table

from ..config import Config
from ..model import families, huggingface
from ..model.blocks import BlockMap, Shapes
from ..model.count import FLOAT32, count
from ..system import terminal
from ..transport.traffic import subnet_bytes

Engine = Literal["hub", "sharded", "ddp"]

WORKERS = (4, 16, 64, 256)
MANY = 64
SMALL = 0.1  # of the local steps' time: a hub that costs less is worth what it survives


def busiest(engine: Engine, n_workers: int, subnet: int, full: int, interval: int) -> int:
    """Bytes of the busiest link; `subnet` is what one parcel costs both ways, `full` one gradient."""
    if engine == "hub":
        return n_workers * subnet
    if engine == "sharded":
        return subnet * (n_workers - 1) // n_workers
    return 2 * full * (n_workers - 1) // n_workers * interval


@dataclass(frozen=True)
class Size:
    """A model and its subnet, counted."""

    name: str
    n_params: int
    n_shared: int  # parameters in no block
    n_subnet: int


@dataclass(frozen=True)
class Forecast:
    """One round of one model with S workers."""

    model: str
    n_workers: int
    n_bytes: dict[Engine, int]
    seconds: dict[Engine, float]
    train_seconds: float  # of the local steps
    take: Engine


def parse_share(ratio: str) -> Fraction:
    """`4/12` or `0.5`: a share of the blocks, of which there may be any number."""
    try:
        kappa = Fraction(ratio)
    except (ValueError, ZeroDivisionError):
        kappa = Fraction(0)
    if not 0 < kappa <= 1:
        raise ValueError(f"--ratio {ratio}: use a share in (0, 1], such as 4/12 or 0.5")
    return kappa


def size(name: str, block_map: BlockMap, shapes: Shapes, kappa: Fraction) -> Size:
    """Count a model whose subnets keep `kappa` of every layer's blocks, whole ones or not."""
    full = block_map.full_widths()
    n_params = count(block_map, shapes, full)
    n_shared = count(block_map, shapes, dict.fromkeys(full, 0))
    return Size(name, n_params, n_shared, n_shared + int(kappa * (n_params - n_shared)))


def sizes(cfg: Config, kappa: Fraction) -> list[Size]:
    """The config's model, then GPT-2 and Llama from small to large, all cut as the config says."""
    known = {cfg.model.type: cfg.model} | families.GPT2_SIZES | families.LLAMA_SIZES
    found = []
    for name, planned in known.items():
        model, b = huggingface.on_meta(huggingface.planned_config(planned)), cfg.blocks
        if b.shared_first + b.shared_last >= model.config.num_hidden_layers:
            continue
        attn_by = b.attn_by if planned is cfg.model else "auto"
        cut = families.block_map(model, b.setting, attn_by)
        cut = cut.select(b.setting, b.shared_first, b.shared_last)
        found.append(size(name, cut, huggingface.shapes(model), kappa))
    return found


def forecast(cfg: Config, of: Size, n_workers: int, gbit: float, tflops: float) -> Forecast:
    """Bytes and seconds of a round over links of `gbit` Gbit/s, with workers of `tflops` TFLOP/s."""
    t, rows = cfg.train, 3 if cfg.train.moments == "carry" else 1
    both = sum(part.total for part in subnet_bytes(of.n_shared, of.n_subnet, rows, cfg.run.wire))
    engines: tuple[Engine, ...] = ("hub", "sharded", "ddp")
    n_bytes = {
        engine: busiest(engine, n_workers, both, FLOAT32 * of.n_params, t.interval)
        for engine in engines
    }
    seconds = {engine: 8 * n / (1e9 * gbit) for engine, n in n_bytes.items()}
    n_tokens = t.interval * t.batch * cfg.data.seq_len
    steps = 6 * of.n_subnet * n_tokens / (1e12 * tflops)
    take: Engine = "hub"
    if seconds["hub"] > SMALL * steps:
        take = "ddp" if seconds["ddp"] < seconds["sharded"] else "sharded"
    return Forecast(of.name, n_workers, n_bytes, seconds, steps, take)


def forecasts(cfg: Config, kappa: Fraction, gbit: float, tflops: float) -> list[Forecast]:
    """The config's model for several S, then all known sizes for one."""
    own, *known = sizes(cfg, kappa)
    counts = sorted({*WORKERS, cfg.train.n_workers})
    made = [forecast(cfg, own, n, gbit, tflops) for n in counts]
    return made + [forecast(cfg, of, MANY, gbit, tflops) for of in known]


def table(made: Sequence[Forecast], title: str) -> Table:
    """Forecasts for a person."""
    result = terminal.table(
        title, "model", "S", "hub, GB", "s", "sharded, GB", "s", "data parallel, GB", "s", "local steps, s",
        "take",
    )  # fmt: skip
    for row in made:
        cells = [
            cell
            for engine in row.n_bytes
            for cell in (_short(row.n_bytes[engine] / 1e9), _short(row.seconds[engine]))
        ]
        result.add_row(row.model, str(row.n_workers), *cells, _short(row.train_seconds), row.take)
    return result


def _short(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"

"""`twistlm plan`: what a config costs, counted from shapes alone, beside the paper's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from rich.table import Table

from ..config import BlocksConfig, Config, ModelConfig
from ..data.token_file import open_tokens
from ..model import families, generator, huggingface
from ..model.blocks import KINDS, SETTINGS, BlockMap, Kind, Shapes, widths_of_ratio
from ..model.count import FLOAT32, count, gpt2_params, paper_rounds, traffic, true_rounds
from ..system import terminal
from ..system.terminal import console
from ..transport.traffic import subnet_bytes
from .memory import held_share

RATIOS = ("10/12", "8/12", "6/12", "4/12", "3/12")


@dataclass(frozen=True)
class PlanRow:
    """One subnet size."""

    setting: str
    ratio: str
    n_params: int
    paper_bytes: int  # weights only, the paper's number of rounds
    true_bytes: int  # weights only, rounds of `interval` local steps
    carried_bytes: int  # weights and both moments, the same rounds


@dataclass(frozen=True)
class Plan:
    """Everything `twistlm plan` prints."""

    model: str
    n_params: int
    n_workers: int
    n_sequences: int
    sequences_from: str
    paper_rounds: int
    true_rounds: int
    legal_k: dict[Kind, tuple[int, int]]
    rows: tuple[PlanRow, ...]
    half: dict[str, dict[str, float]]  # asymptotic memory: model -> share of parameters
    links: tuple[Forecast, ...]  # the busiest link in a round
    links_say: str  # what they were reckoned with

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make(cfg: Config, ratio: str | None = None, gbit: float = 1.0, tflops: float = 100.0) -> Plan:
    """Count parameters on the meta device and multiply; nothing is downloaded or allocated.

    `ratio` is the share of blocks behind the forecasts for links of `gbit` Gbit/s and workers of
    `tflops` TFLOP/s; None: what the config's workers hold.
    """
    if not gbit > 0 or not tflops > 0:
        raise ValueError(f"--gbit {gbit:g} and --tflops {tflops:g}: both must be greater than 0")
    model = huggingface.on_meta(huggingface.planned_config(cfg.model))
    shapes = huggingface.shapes(model)
    block_map = families.partition(model, cfg.blocks)
    t = cfg.train
    generator.check(block_map, cfg.blocks, t.n_workers)
    kappa = held_share(cfg, block_map, shapes) if ratio is None else parse_share(ratio)
    n_sequences, source, epochs = _sequences(cfg)
    in_paper = paper_rounds(n_sequences, epochs, t.batch, t.interval)
    in_truth = true_rounds(n_sequences, epochs, t.batch, t.interval, t.n_workers)
    rows = [
        _row(
            "full",
            "12/12",
            count(block_map, shapes, block_map.full_widths()),
            t.n_workers,
            in_paper,
            in_truth,
        )
    ]
    for setting in SETTINGS:
        try:
            cut = families.partition(model, replace(cfg.blocks, setting=setting))
        except ValueError:
            continue  # this kind cannot be cut in this family
        rows += _rows(cut, shapes, setting, t.n_workers, in_paper, in_truth)
    legal = {
        kind: generator.legal_range(n, t.n_workers, len(cfg.blocks.common(kind)))
        for kind in KINDS
        if (n := block_map.n_blocks(kind))
    }
    sizes = families.GPT2_SIZES
    same = any(size.type == cfg.model.type for size in sizes.values())
    half = {name: _half(size, cfg.blocks) for name, size in sizes.items()} if same else {}
    return Plan(
        cfg.model.type,
        count(block_map, shapes, block_map.full_widths()),
        t.n_workers,
        n_sequences,
        source,
        in_paper,
        in_truth,
        legal,
        tuple(rows),
        half,
        tuple(forecasts(cfg, kappa, gbit, tflops)),
        f"{ratio or f'{float(kappa):.0%}'} of the blocks, {'weights and moments' if t.moments == 'carry' else 'weights'}, run.wire = "
        f"{cfg.run.wire}, {gbit:g} Gbit/s, {t.interval} steps of {t.batch} x {cfg.data.seq_len} tokens at "
        f"{tflops:g} TFLOP/s",
    )


def _rows(
    cut: BlockMap, shapes: Shapes, setting: str, n_workers: int, in_paper: int, in_truth: int
) -> list[PlanRow]:
    rows = []
    for ratio in RATIOS:
        try:
            widths = widths_of_ratio(cut, ratio)
        except ValueError:
            continue  # no whole number of blocks
        rows.append(_row(setting, ratio, count(cut, shapes, widths), n_workers, in_paper, in_truth))
    return rows


def _row(setting: str, ratio: str, n: int, n_workers: int, in_paper: int, in_truth: int) -> PlanRow:
    paper, weights = traffic(n, n_workers, in_paper), traffic(n, n_workers, in_truth)
    return PlanRow(setting, ratio, n, paper, weights, traffic(n, n_workers, in_truth, rows=3))


def _sequences(cfg: Config) -> tuple[int, str, float]:
    """Training sequences, where that number comes from, and epochs over them."""
    t = cfg.train
    if t.rounds:
        return t.rounds * t.interval * t.batch * t.n_workers, "train.rounds", 1.0
    try:
        return open_tokens(cfg.data.train).n_sequences(cfg.data.seq_len), cfg.data.train, t.epochs
    except ValueError as error:
        if not cfg.data.planned_sequences:
            raise ValueError(f"{error}; without tokens, give data.planned_sequences=N") from None
    return cfg.data.planned_sequences, "data.planned_sequences", t.epochs


def _half(size: ModelConfig, blocks: BlocksConfig) -> dict[str, float]:
    """Share of parameters that a subnet with half the blocks keeps, by the paper's formulas."""
    config = huggingface.planned_config(size)
    shape = (
        config.num_hidden_layers,
        config.hidden_size,
        config.vocab_size,
        config.max_position_embeddings,
    )
    n_layers, full = shape[0], gpt2_params(*shape)
    cut_layers = {
        f"first {blocks.shared_first} and last {blocks.shared_last} layers shared": n_layers
        - blocks.shared_first
        - blocks.shared_last,
        "all layers cut": n_layers,
    }
    return {name: gpt2_params(*shape, n_cut=n, share=0.5) / full for name, n in cut_layers.items()}


UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))


def show(plan: Plan) -> None:
    """Print a plan as tables."""
    console.print(
        f"{plan.model}: {plan.n_params:,} parameters, {plan.n_params * FLOAT32 / 1e6:,.1f} MB in float32"
    )
    for kind, (least, most) in plan.legal_k.items():
        console.print(f"legal K for {kind} with S = {plan.n_workers}: {least}..{most}")
    console.print(
        f"{plan.n_sequences:,} sequences ({plan.sequences_from}): {plan.true_rounds:,} rounds of local steps; "
        f"the paper's formula counts {plan.paper_rounds:,}"
    )
    most = max(row.carried_bytes for row in plan.rows)
    size, unit = next((n, u) for n, u in UNITS if most >= n / 10 or n == UNITS[-1][0])
    table = terminal.table(
        "one subnet, and bytes both ways over all workers and rounds",
        "setting",
        "blocks",
        "parameters",
        "of full",
        "MB",
        f"paper's formula, {unit}",
        f"weights, {unit}",
        f"+ moments, {unit}",
    )
    for row in plan.rows:
        table.add_row(
            row.setting,
            row.ratio,
            f"{row.n_params:,}",
            f"{row.n_params / plan.n_params:.1%}",
            f"{row.n_params * FLOAT32 / 1e6:,.1f}",
            f"{row.paper_bytes / size:,.2f}",
            f"{row.true_bytes / size:,.2f}",
            f"{row.carried_bytes / size:,.2f}",
            end_section=row.ratio in ("12/12", RATIOS[-1]),
        )
    console.print(table)
    if plan.half:
        heads = next(iter(plan.half.values()))
        title = "a subnet with half the blocks, as a share of its parent"
        table = terminal.table(title, "parent", *heads)
        for parent, shares in plan.half.items():
            table.add_row(parent, *(f"{share:.1%}" for share in shares.values()))
        console.print(table)
    console.print(forecast_table(plan.links, f"the busiest link in a round: {plan.links_say}"))
    console.print(
        "ray: survives any worker, and is taken while it costs less than a tenth of the local steps (hybrid, true "
        "and masked cost as much and survive none). sharded: a death ends the run, which resumes from its "
        "checkpoint. data parallel is train.method = dense: where it wins, try run.wire = int8 or train.moments = reset."
    )


Engine = Literal["ray", "sharded", "ddp"]

WORKERS = (4, 16, 64, 256)
MANY = 64
SMALL = 0.1  # of the local steps' time: an engine that costs less is worth what it survives
STORE = 5.0  # Gbit/s that Ray's object store carries between hosts, however fast they are linked


def busiest(engine: Engine, n_workers: int, subnet: int, full: int, interval: int) -> int:
    """Bytes of the busiest link; `subnet` is what one part costs both ways, `full` one gradient."""
    if engine == "ray":
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
    own = huggingface.on_meta(huggingface.planned_config(cfg.model))
    found, b = [], cfg.blocks
    for name, model in {cfg.model.type: own, **families.known_sizes()}.items():
        if b.shared_first + b.shared_last >= model.config.num_hidden_layers:
            continue
        attn_by = b.attn_by if model is own else "auto"
        cut = families.block_map(model, b.setting, attn_by)
        cut = cut.select(b.setting, b.shared_first, b.shared_last)
        found.append(size(name, cut, huggingface.shapes(model), kappa))
    return found


def forecast(cfg: Config, of: Size, n_workers: int, gbit: float, tflops: float) -> Forecast:
    """Bytes and seconds of a round over links of `gbit` Gbit/s, with workers of `tflops` TFLOP/s."""
    t, rows = cfg.train, 3 if cfg.train.moments == "carry" else 1
    both = sum(part.total for part in subnet_bytes(of.n_shared, of.n_subnet, rows, cfg.run.wire))
    engines: tuple[Engine, ...] = ("ray", "sharded", "ddp")
    n_bytes = {
        engine: busiest(engine, n_workers, both, FLOAT32 * of.n_params, t.interval)
        for engine in engines
    }
    speeds: dict[Engine, float] = {"ray": min(gbit, STORE), "sharded": gbit, "ddp": gbit}
    seconds = {engine: 8 * n / (1e9 * speeds[engine]) for engine, n in n_bytes.items()}
    n_tokens = t.interval * t.batch * cfg.data.seq_len
    steps = 6 * of.n_subnet * n_tokens / (1e12 * tflops)
    take: Engine = "ray"
    if seconds["ray"] > SMALL * steps:
        take = "ddp" if seconds["ddp"] < seconds["sharded"] else "sharded"
    return Forecast(of.name, n_workers, n_bytes, seconds, steps, take)


def forecasts(cfg: Config, kappa: Fraction, gbit: float, tflops: float) -> list[Forecast]:
    """The config's model for several S, then all known sizes for one."""
    own, *known = sizes(cfg, kappa)
    counts = sorted({*WORKERS, cfg.train.n_workers})
    made = [forecast(cfg, own, n, gbit, tflops) for n in counts]
    return made + [forecast(cfg, of, MANY, gbit, tflops) for of in known]


def forecast_table(made: Sequence[Forecast], title: str) -> Table:
    """Forecasts for a person."""
    result = terminal.table(
        title,
        "model",
        "S",
        "ray, GB",
        "s",
        "sharded, GB",
        "s",
        "data parallel, GB",
        "s",
        "local steps, s",
        "take",
    )
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

"""What `twistlm bench train` prints: a row per size of worker, where its time goes, and stock tools beside it."""

from __future__ import annotations

from rich.table import Table

from ...system import terminal
from . import profile
from .train import TrainBench


def tables(made: TrainBench) -> list[Table]:
    """The sizes, and what stock tools take in the same run."""
    title = (
        f"a local step: batch {made.batch} x {made.seq_len} tokens, AdamW included (faster: than the full "
        f"model; ideal: by FLOPs; ceiling: share of {made.ceiling_tflops:.3g} TFLOP/s; overhead: share of a "
        f"round of {made.n_workers} workers x {made.interval} steps)"
    )
    result = terminal.table(
        title,
        *("blocks", "params", "ms", "tok/s", "TFLOP/s", "ceiling"),
        *("faster", "ideal", "state MB", "peak MB", "overhead"),
    )
    full = made.full()
    for row in made.rows:
        result.add_row(
            f"{row.ratio} {row.setting}",
            f"{row.n_params / 1e6:.1f}M",
            f"{row.ms:.2f}",
            f"{row.tokens_per_s / 1e3:.0f}k",
            f"{row.tflops:.3g}",
            f"{row.tflops / made.ceiling_tflops:.1%}",
            f"{full.ms / row.ms:.2f}x" if full else "",
            f"{full.flops / row.flops:.2f}x" if full else "",
            f"{row.state_bytes / 1e6:,.0f}",
            _megabytes(row.peak_bytes),
            f"{row.overhead:.1%}",
        )
    profiles = [
        (f"{row.ratio} {row.setting}", row.ms, row.profile)
        for row in made.rows
        if row.profile is not None and row.setting == made.rows[0].setting
    ]
    where = [profile.table(profiles)] if profiles else []
    if not made.references:
        return [result, *where]
    beside = terminal.table(
        "the same step with stock parts", "", "ms/step", "peak MB", "ours at full width"
    )
    for reference in made.references:
        faster = f"{reference.ms / full.ms:.1f}x faster" if full else ""
        beside.add_row(
            reference.name, f"{reference.ms:.2f}", _megabytes(reference.peak_bytes), faster
        )
    return [result, *where, beside]


def _megabytes(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / 1e6:,.0f}"

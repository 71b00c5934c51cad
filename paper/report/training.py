"""Training as figures: the loss over tokens, how often blocks were dealt, bytes per round."""

from __future__ import annotations

import statistics
from typing import Any

from twistlm import config
from twistlm.lab.points import Training
from twistlm.model import families, generator, huggingface

from ..page import draw
from ..page.section import Figure, Section, Table, count, number

MOST = 8  # lines in a figure
ROUNDS = 400  # of a deal that are counted again
POINTS = 150  # of a curve that are drawn
NO_MARKS = draw.LineStyle(marks=False)


def section(trainings: list[Training]) -> Section | None:
    """All trainings of a source; None where no round was finished."""
    begun = [training for training in trainings if training.rows]
    if not begun:
        return None
    figures = [_losses(begun), *_evaluations(begun), *_coverage(begun), _bytes(begun)]
    rows = []
    for t in begun:
        last = t.rows[-1]
        tokens = sum(row["n_tokens"] for row in t.rows)
        seconds = sum(row["seconds"] for row in t.rows)
        planned = f" of {t.n_rounds}" if t.n_rounds else ""
        rows.append(
            (
                t.name,
                f"{last['round']}{planned}",
                count(tokens),
                f"{seconds:,.1f}",
                f"{tokens / seconds:,.0f}",
                number(last["loss"], 3),
            )
        )
    head = ("run", "rounds", "tokens", "seconds", "tokens/s", "last loss")
    running = [t.name for t in begun if t.n_rounds and t.rows[-1]["round"] < t.n_rounds]
    note = f"not finished: {', '.join(running)}" if running else ""
    what = (
        "One line per round on disk, read as it is: a run that is still going shows how far it is."
    )
    return Section(
        "training", "Training", what, (Table(head, tuple(rows), note=note),), tuple(figures)
    )


def _losses(trainings: list[Training]) -> Figure:
    """The mean loss of every worker's steps, averaged over neighbouring rounds."""
    series = {}
    for t in trainings[:MOST]:
        chunk = max(1, len(t.rows) // POINTS)
        tokens, curve = 0, {}
        for first in range(0, len(t.rows), chunk):
            part = t.rows[first : first + chunk]
            tokens += sum(row["n_tokens"] for row in part)
            curve[tokens / 1e6] = statistics.fmean(row["loss"] for row in part)
        series[_label(t)] = curve
    taught = [_label(t) for t in trainings[:MOST] if _is_taught(t)]
    last = {label: list(c.values())[-1] for label, c in series.items() if label not in taught}
    reading = ""
    if last:
        low = min(last, key=last.__getitem__)
        reading = f"Lowest at its end: {low} with {last[low]:.3f}."
    if taught:  # another quantity
        reading += f" Mostly the distance to a teacher: {', '.join(taught)}."
    return Figure(
        "training-loss",
        "Training loss",
        reading.strip(),
        series,
        lambda axes: draw.lines(axes, series, x="million tokens", y="loss", style=NO_MARKS),
        height=3.4,
    )


def _is_taught(t: Training) -> bool:
    """Whether its loss is KL to a teacher's predictions, beside some cross-entropy."""
    return t.config.get("train", {}).get("teacher", "none") != "none"


def _label(t: Training) -> str:
    return t.name.rsplit("-", 1)[0] if len(t.name.rsplit("-", 1)[-1]) == 16 else t.name


def _evaluations(trainings: list[Training]) -> list[Figure]:
    """Perplexity while training, where `run.eval_every` asked for it."""
    series: dict[str, dict[Any, float]] = {}
    for t in trainings[:MOST]:
        for row in t.rows:
            for size, found in row.get("eval", {}).items():
                value = found if size == "full" else found["mean"]
                series.setdefault(f"{_label(t)} {size}", {})[row["round"]] = value
    if not series:
        return []
    last = {label: list(values.values())[-1] for label, values in series.items()}
    low = min(last, key=last.__getitem__)
    reading = f"Lowest at the last evaluation: {low} with {number(last[low])}."
    return [
        Figure(
            "training-eval",
            "Perplexity while training",
            reading,
            series,
            lambda axes: draw.lines(
                axes, series, x="round", y="perplexity", style=draw.LineStyle(log=True)
            ),
            height=3.6,
        )
    ]


def _bytes(trainings: list[Training]) -> Figure:
    """Counted bytes of a round, median: down to workers and up from them."""
    groups = {
        _label(t): {
            "down": statistics.median(row["bytes_down"] for row in t.rows) / 1e6,
            "up": statistics.median(row["bytes_up"] for row in t.rows) / 1e6,
        }
        for t in trainings[:MOST]
    }
    total = {label: sum(parts.values()) for label, parts in groups.items()}
    low, high = min(total, key=total.__getitem__), max(total, key=total.__getitem__)
    reading = f"{low} moves {total[low]:,.1f} MB in a round, {high} {total[high]:,.1f} MB."

    def paint(axes: Any) -> None:
        draw.bars(axes, groups, y="MB per round")
        axes.set_xticks(range(len(groups)), list(groups), rotation=40, ha="right", fontsize=7)
        axes.legend(loc="upper right")

    return Figure("training-bytes", "Bytes of a round, counted", reading, groups, paint, height=3.2)


def _coverage(trainings: list[Training]) -> list[Figure]:
    """How often the least and the most dealt block was held, against the mean: dealt again from the seed."""
    series: dict[str, dict[Any, float]] = {}
    covered: list[float] = []
    for t in [t for t in trainings if t.config.get("train", {}).get("method") == "twist"][:3]:
        shares = dealt(config.from_record(t.config), min(ROUNDS, t.rows[-1]["round"]))
        covered += [share for _, _, share in shares]
        label = _label(t)
        series[f"{label}: least held"] = {r + 1: low for r, (low, _, _) in enumerate(shares)}
        series[f"{label}: most held"] = {r + 1: high for r, (_, high, _) in enumerate(shares)}
    if not series:
        return []
    ends = {label: list(values.values())[-1] for label, values in series.items()}
    reading = (
        f"At least {min(covered):.0%} of the blocks are trained in every round; at the end the least held "
        f"block has {min(ends.values()):.2f} times, the most held {max(ends.values()):.2f} times the mean."
    )
    return [
        Figure(
            "training-coverage",
            "Holds of a block, times the mean of all blocks",
            reading,
            series,
            lambda axes: draw.lines(axes, series, x="round", y="times the mean", style=NO_MARKS),
            height=3.4,
        )
    ]


def dealt(cfg: config.Config, n_rounds: int) -> list[tuple[float, float, float]]:
    """After every round: the fewest and most holds of a block over the mean, and the round's covered share."""
    model = huggingface.on_meta(huggingface.planned_config(cfg.model))
    block_map = families.partition(model, cfg.blocks)
    held: generator.Held = {g.name: (0,) * g.n_blocks for g in block_map.groups}
    found = []
    for r in range(n_rounds):
        hands = generator.for_training(
            block_map, cfg.train.n_workers, cfg.blocks, seed=cfg.run.seed, round=r, held=held
        )
        held = generator.counted(held, hands)
        seen = sum(len({b for hand in hands for b in hand[name]}) for name in held)
        ratios = [n / statistics.fmean(counts) for counts in held.values() for n in counts]
        n_blocks = sum(len(counts) for counts in held.values())
        found.append((min(ratios), max(ratios), seen / n_blocks))
    return found

"""Going on after a stop: which checkpoint, what may have changed since, and a line that says so.

The model, the data and the seed must be the same. S, K, the batch and all other knobs may change,
since a checkpoint is always a round boundary and the data's ledger counts sequences (`leases`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .. import config
from ..config import Config
from ..system import provenance
from ..system.terminal import console
from . import checkpoint
from .checkpoint import Checkpoint

REFUSED = (
    "model",
    "data",
    "run.seed",
    "train.method",
    "train.moments",
    "train.precision",
    "train.teacher",
)


def check_there(out: Path) -> None:
    """Refuse a folder without a checkpoint: whoever says --resume has named one by mistake."""
    if not checkpoint.numbered(out / "checkpoints"):
        raise ValueError(
            f"run.out = {str(out)!r}: there is no checkpoint to resume; to start the run, leave "
            f"out --resume, or say --auto-resume, which starts it where there is none"
        )


def find(folder: Path, cfg: Config) -> Checkpoint | None:
    """The newest valid checkpoint to go on from, refusing one of another run."""
    found, broken = checkpoint.newest(folder)
    for sentence in broken:
        console.print(f"skipped: {sentence}", style="yellow")
    if found is None:
        if broken:
            raise ValueError(f"no checkpoint in {folder} is valid: {broken[0]}")
        return None
    changed = changes(found, cfg)
    for name, (was, now) in changed.items():
        outer_appears = name == "train.outer" and "none" in (was, now)
        if name in REFUSED or name.split(".")[0] in REFUSED or outer_appears:
            raise ValueError(
                f"cannot resume {found.path}: {name} was {was!r} and is now {now!r}; to go on with "
                f"the run's own config: twistlm train {cfg.run.out} --resume"
            )
    return found


def announce(found: Checkpoint, cfg: Config) -> None:
    """Say where a run goes on, and what is not as it was."""
    for name, (was, now) in changes(found, cfg).items():
        console.print(f"{name} was {was!r} and is now {now!r}", style="yellow")
    console.print(f"resuming from {found.path}")
    was, now = found.manifest["device"], provenance.describe_run()["device"]
    if was != now:
        console.print(
            f"the device was {was!r} and is now {now!r} (run.device, run.threads): the run goes "
            f"on, but not bit for bit as it would have there",
            style="yellow",
        )


def finished(found: Checkpoint, cfg: Config, quiet: bool) -> None:
    """Say that nothing is left to train; a changed key that can have no effect is refused."""
    key = "train.rounds" if cfg.train.rounds else "train.epochs"
    more = f"to train more, say {key}=N with N > {getattr(cfg.train, key[6:])}"
    sentence = f"{cfg.run.out} is finished after round {found.round}"
    if changed := changes(found, cfg):
        name, (_, now) = next(iter(changed.items()))
        raise ValueError(f"{sentence}: {name} = {now!r} would change nothing; {more}")
    if not quiet:
        console.print(f"{sentence}: nothing was trained; {more}")


def changes(found: Checkpoint, cfg: Config) -> dict[str, tuple[Any, Any]]:
    """`section.key` -> (was, is now) of every knob that makes a difference to what is trained."""
    old, new = config.to_dict(found.config), config.to_dict(cfg)
    knobs = [
        (section, key) for section in ("model", "data", "blocks", "train") for key in new[section]
    ]
    pairs = {f"{s}.{k}": (old[s][k], new[s][k]) for s, k in [*knobs, ("run", "seed")]}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def log_(out: Path, found: Checkpoint, cfg: Config) -> None:
    """One line in `resumes.jsonl`: from which round, what changed, and who went on with it."""
    line = {"round": found.round, "changed": changes(found, cfg), **provenance.describe_run()}
    with (out / "resumes.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")

"""A line of JSON for each round; the same for TensorBoard and Weights & Biases."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..model.huggingface import refusing
from ..system.files import whole_file
from ..system.manifest import parse_json


class Metrics:
    """`metrics.jsonl`: one line per round, without those of rounds that a resume runs again.

    The same numbers go to `tensorboard/` of the run folder where TensorBoard is installed, and to
    Weights & Biases where a run of it is open or WANDB_PROJECT names where to open one.
    """

    def __init__(self, out: Path, start: int, about: dict[str, Any] | None = None):
        self.wandb = _wandb(out, about or {})  # first: it may be refused
        self.board = _board(out / "tensorboard", start)
        self.path = out / "metrics.jsonl"
        kept = []
        if self.path.is_file():
            for line in self.path.read_text().splitlines():
                with suppress(ValueError):  # a line cut short by a crash
                    kept += [line] if parse_json(line, self.path)["round"] <= start else []
        text = "".join(f"{line}\n" for line in kept)
        whole_file(self.path, text)  # never in part: the lines before are in no other file
        self.size = len(text.encode())  # bytes of whole lines
        self.waiting = ""  # lines that a full disk did not take yet

    def write(self, row: dict[str, Any]) -> None:
        """Append a line; one that a full disk refuses waits for the next."""
        self.waiting += json.dumps(row) + "\n"
        data = self.waiting.encode()
        with suppress(OSError), self.path.open("ab", buffering=0) as file:
            file.truncate(self.size)  # what the disk took of a refused line
            if file.write(data) == len(data):
                self.size += len(data)
                self.waiting = ""
        if self.board is None and self.wandb is None:
            return
        numbers = {f"train/{key}": row[key] for key in row if key not in ("round", "eval")}
        numbers["train/tokens_per_s"] = row["n_tokens"] / row["seconds"]
        for size, value in row.get("eval", {}).items():
            numbers[f"perplexity/{size}"] = value if size == "full" else value["mean"]
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, row["round"])
            self.board.flush()
        if self.wandb is not None:
            self.wandb[0].log({**numbers, "round": row["round"]})

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
        if self.wandb is not None and self.wandb[1]:
            self.wandb[0].finish()


def _board(folder: Path, start: int) -> Any:
    """A writer of TensorBoard's own format, or None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # none, or a broken installation, which must not stop a training
        return None
    return SummaryWriter(str(folder), purge_step=start + 1 if start else None)


def _wandb(out: Path, about: dict[str, Any]) -> tuple[Any, bool] | None:
    """A run of Weights & Biases, and whether it was opened here; None where nobody asked for it."""
    if (loaded := sys.modules.get("wandb")) and loaded.run is not None:
        return loaded.run, False
    if not (project := os.environ.get("WANDB_PROJECT")):
        return None
    try:
        import wandb  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    what = f"WANDB_PROJECT = {project!r} opens no run of Weights & Biases (unset it to do without)"
    with refusing(what):
        return wandb.init(name=out.name, dir=str(out), config=about), True

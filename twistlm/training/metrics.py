"""A line of JSON for each round, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..system.files import whole_file
from ..system.manifest import parse_json


class Metrics:
    """`metrics.jsonl`: one line per round; on resume, lines of rounds that will run again are
    dropped.

    Where TensorBoard is installed, the same numbers go to `tensorboard/` in the run folder.
    """

    def __init__(self, out: Path, start: int):
        self.board = _board(out / "tensorboard", start)
        self.path = out / "metrics.jsonl"
        kept = []
        if self.path.is_file():
            for line in self.path.read_text().splitlines():
                try:
                    kept += [line] if parse_json(line, self.path)["round"] <= start else []
                except ValueError:
                    continue  # a line cut short by a crash
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
        if self.board is not None:
            for name, value in scalars(row).items():
                self.board.add_scalar(name, value, row["round"])
            self.board.flush()

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """A round's numbers by name: `train/loss`, `perplexity/6/12`."""
    found = {f"train/{key}": row[key] for key in row if key not in ("round", "eval")}
    found["train/tokens_per_s"] = row["n_tokens"] / row["seconds"]
    for size, value in row.get("eval", {}).items():
        found[f"perplexity/{size}"] = value if size == "full" else value["mean"]
    return found


def _board(folder: Path, start: int) -> Any:
    """A writer of TensorBoard's own format, or None where it is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # a broken installation must not stop a training
        return None
    return SummaryWriter(str(folder), purge_step=start + 1 if start else None)

"""A run: what stays the same from its first round to its last, and where it stands."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..compute.loss import AnyTeacher
from ..compute.perplexity import Evaluator
from ..config import Config
from ..data import stream
from ..data.stream import Batches, Leases
from ..model.central import ROWS, Central
from ..model.layout import CutModel
from ..model.masks import Order
from ..model.subnet import Rho
from ..system.signals import Stop
from ..transport.ranks import Cluster
from .worker import TrainerPool


@dataclass(frozen=True)
class Progress:
    """The state of a run after a committed round, beside the central tensors.

    A round makes a new one from it; who keeps the old one can go back to it.
    """

    round: int = 0  # rounds done
    leases: Leases = field(default_factory=Leases)  # which sequences these rounds have trained
    rho: Rho = field(default_factory=dict)  # per layer, where `train.scale` is measured
    order: Order = field(default_factory=dict)  # of each layer's blocks, where masks are nested
    teacher: str = ""  # a name of its weights, where there is one
    text: str = ""  # sha256 of the training tokens


def to_dict(progress: Progress) -> dict[str, Any]:
    """Plain data for JSON; `from_dict` reads it back."""
    return vars(progress) | {"leases": stream.to_dict(progress.leases)}


def from_dict(table: dict[str, Any]) -> Progress:
    """Old checkpoints have no order, and do not name their teacher or text."""
    order = {name: tuple(map(int, numbers)) for name, numbers in table.get("order", {}).items()}
    rho = {name: float(value) for name, value in table["rho"].items()}
    named = (str(table.get(key, "")) for key in ("teacher", "text"))
    return Progress(table["round"], stream.from_dict(table["leases"]), rho, order, *named)


def broadcast(progress: Progress, cluster: Cluster) -> Progress:
    text = json.dumps(to_dict(progress)).encode()
    (length,) = cluster.broadcast([len(text)])
    values = cluster.broadcast(list(text) if cluster.is_central else [0] * int(length))
    return progress if cluster.is_central else from_dict(json.loads(bytes(map(int, values))))


@dataclass(frozen=True)
class Run:
    """Config, model, data and the central tensors of one process of a run.

    What changes from round to round is `Progress`; how a round is carried is an engine's.
    """

    cfg: Config
    cluster: Cluster
    cut: CutModel
    batches: Batches
    n_rounds: int  # as planned, when nothing is lost: the schedule's length
    central: Central | None = None  # on the central rank
    evaluator: Evaluator | None = None  # likewise
    teacher: AnyTeacher | None = None
    stop: Stop = field(default_factory=Stop)

    @cached_property
    def trainers(self) -> TrainerPool:
        """Where this process trains the workers that it plays."""
        return TrainerPool(self.cut, self.cfg, self.central, self.teacher)

    @property
    def state_bytes(self) -> int:
        """Of the central model: weights, moments, outer momentum."""
        return n_state_rows(self.cfg) * self.cut.full.n_params * self.cut.dtype.itemsize

    @property
    def total_steps(self) -> int:
        return self.n_rounds * self.cfg.train.interval

    def schedule_round(self, progress: Progress) -> int:
        """The round of the learning rate's schedule: as far from its end as the run is."""
        return self.n_rounds - (self.end(progress) - progress.round)

    def end(self, progress: Progress) -> int:
        """How many rounds there will be, seen from `progress`.

        Epochs last until their sequences are trained: results that were lost take rounds of their
        own.
        """
        t, leases = self.cfg.train, progress.leases
        if t.rounds:
            return t.rounds
        n_left = t.epochs * self.batches.n_sequences - (leases.next - len(leases.returned))
        return progress.round + max(0, int(n_left // (t.n_workers * t.batch * t.interval)))


def n_rows(cfg: Config) -> int:
    """Rows of the central buffer: the weights, and with carried moments Adam's m and v."""
    return len(ROWS) if cfg.train.moments == "carry" or cfg.train.method != "twist" else 1


def n_state_rows(cfg: Config) -> int:
    """Rows of the central state: those of the buffer, and the outer optimizer's momentum."""
    return n_rows(cfg) + (cfg.train.nesterov() is not None)


def is_in_place(cfg: Config) -> bool:
    """Whether the central model is trained where it lies, with no copy: nobody else starts from it.

    So it is with one worker, which then holds all blocks, and with the controls.
    """
    t, run = cfg.train, cfg.run
    is_plain = run.wire == "fp32" and t.moments == "carry" and t.nesterov() is None
    is_here = (run.variant, run.seat, run.central) == ("local", "physical", "device")
    return t.method != "twist" or (t.n_workers == 1 and is_plain and is_here)


def dtype_of(cfg: Config) -> torch.dtype:
    """Of the central model's weights and moments."""
    return torch.float64 if cfg.train.precision == "float64" else torch.float32

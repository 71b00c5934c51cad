"""(4) A worker as a Ray actor: it keeps no data, and outlives a driver's crash."""

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import config
from ...compute.perplexity import Evaluator, Text
from ...model import huggingface
from ...model.blocks import KINDS
from ...model.central import Central, SubnetBuffer
from ...model.layout import cut_model
from ...model.ranges import Ranges, Split
from ...model.subnet import Rho, measure_rho
from ...system.device import pick_device
from ...system.provenance import version
from ...transport import protocol, wire
from ...transport.protocol import Moved, Piece, RoundOrder, RunDescription, packed, unpacked
from ...transport.ray_cluster import K_LABELS, MEMORY_LABEL, exceptions, ray
from .. import plan, teacher
from ..run import Progress, dtype_of, n_rows
from ..worker import TrainerPool


class Actor:
    """A process of a run that ends when no run has spoken to it for `patience` seconds."""

    def __init__(self, patience: float) -> None:
        self.heard, self.patience = time.monotonic(), patience
        threading.Thread(target=self._end_alone, daemon=True).start()

    def _end_alone(self) -> None:
        while time.monotonic() - self.heard < self.patience:
            time.sleep(min(1.0, self.patience / 10))
        os._exit(0)

    @ray.method(concurrency_group="pulse")  # also while it works
    def ping(self) -> None:
        """The run is there."""
        self.heard = time.monotonic()


def settings(run: RunDescription) -> config.Config:
    """The config of a run, once this process is known to have the same twistlm."""
    if run.version != version("twistlm"):
        raise ValueError(f"it has twistlm {version('twistlm')}, the run {run.version}")
    cfg = config.from_dict(run.config)
    if cfg.run.threads:
        torch.set_num_threads(cfg.run.threads)
    return cfg


class Worker(Actor):
    """Trains what the owners of the central model send it."""

    run: RunDescription | None = None

    def enter(self, run: RunDescription, packed: teacher.Packed | None) -> protocol.WorkerInfo:
        """Build the run's model, unless it is built already."""
        here = ray.get_runtime_context()
        if run != self.run:
            self.cfg, dtype = (cfg := settings(run)), dtype_of(cfg)
            device = pick_device("cpu" if self.cfg.run.device == "cpu" else "auto")
            template = huggingface.from_table(run.model, dtype).eval()
            cut = cut_model(template, self.cfg.blocks, device, dtype)
            labels = here.get_node_labels()
            self.widths = {k: int(labels[K_LABELS[k]]) for k in KINDS if K_LABELS[k] in labels}
            if MEMORY_LABEL in labels:  # 0: what is free on its GPU
                n_bytes = int(labels[MEMORY_LABEL]) or torch.cuda.mem_get_info(device)[0]
                self.widths = plan.largest_k(self.cfg, template, packed is not None, n_bytes)
            frozen = teacher.unpack(packed, self.cfg, cut)
            self.trainers, self.run = TrainerPool(cut, self.cfg, None, frozen), run
        name = f"{socket.gethostname()}-{os.getpid()}"
        return protocol.WorkerInfo(name, here.get_node_id(), self.widths)

    def train(
        self, order: RoundOrder, owners: list[Any], *pieces: Piece
    ) -> tuple[float, list[Moved | str] | Exception]:
        """A round's local steps: the sum of their losses, and what the owners say of the update."""
        assert self.run is not None
        cut, kind, n = self.trainers.cut, self.cfg.run.wire, len(pieces)
        split = Ranges(cut.segments, n).split(cut.segments.index(order.blueprint))
        shapes = [(n_rows(self.cfg), split.size(i)) for i in range(n)]
        try:
            payloads = zip(map(unpacked, pieces), shapes, strict=True)
            sent = _joined(split, [wire.read_down(kind, *each, cut.dtype) for each in payloads])
            gates, ids = unpacked(order.gates), unpacked(order.tokens).long()
            topk = unpacked(order.teacher_topk) if order.teacher_topk else None
        except protocol.RejectedResult:
            raise ValueError("what it was sent did not arrive as it was") from None
        part = SubnetBuffer(cut.segments, order.blueprint, sent.to(cut.device))
        trainer = self.trainers.get(part.layout, "physical")
        result = trainer.train(part, gates, ids, topk, order.at, self.run.total_steps)
        new = result.buffer.cpu()
        parts = ((split.get(new, i), split.get(sent[:1], i)[0]) for i in range(n))
        updates = [packed(wire.up(kind, *part)) for part in parts]
        return float(result.stats.loss_sum), self.send(order, owners, updates)

    def send(
        self, order: RoundOrder, owners: list[Any], updates: list[Piece]
    ) -> list[Moved | str] | Exception:
        """What every owner says of its piece of the update, or why one says nothing."""
        where, pairs = (order.attempt, order.worker), zip(owners, updates, strict=True)
        try:
            return ray.get([owner.check.remote(*where, piece) for owner, piece in pairs])
        except exceptions.RayError as error:  # not raised: it is no error of this worker
            return error

    def rho(self, ids: Tensor, *pieces: Piece) -> Rho:
        """rho of every layer of the central model, whose weights all owners sent, on ids [1, T]."""
        full = self._evaluator(None, pieces, Progress()).full
        return measure_rho(full, ids.to(self.trainers.cut.device))

    def evaluate(self, text: Text, progress: Progress, *pieces: Piece) -> tuple[dict, str]:
        """Perplexities of the central model and its subnets."""
        evaluator = self._evaluator(text, pieces, progress)
        return evaluator.scores(self.cfg.run, progress.order, lambda: None)

    def _evaluator(self, text: Any, pieces: Sequence[Piece], progress: Progress) -> Evaluator:
        cut, t = self.trainers.cut, self.cfg.train
        weights = _joined(Ranges(cut.segments, len(pieces)).whole, [*map(unpacked, pieces)])
        central = Central(cut.segments, weights.to(cut.device, copy=True))
        return Evaluator(
            cut.template, cut.block_map, central, text, t.scale, t.precision, progress.rho
        )


def _joined(split: Split, parts: list[Tensor]) -> Tensor:
    """A buffer [rows, n] out of all owners' parts; what one owner sent is not copied."""
    if len(parts) == 1:
        return parts[0]
    n = sum(part.shape[1] for part in parts)
    buffer = torch.empty(len(parts[0]), n, dtype=parts[0].dtype)
    for i, part in enumerate(parts):
        split.set_(buffer, i, part)
    return buffer


WORKER = Worker  # what a place is filled with

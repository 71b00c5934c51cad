"""(4) A worker as a Ray actor: it keeps no data, and outlives a driver's crash."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ... import config
from ...compute.perplexity import Evaluator, Text
from ...config import Wire
from ...model.blocks import KINDS, Blueprint
from ...model.central import Central, subnet_buffer
from ...model.layout import cut_model
from ...model.ranges import Ranges, Split
from ...model.subnet import Rho, measure_rho
from ...system.device import pick_device
from ...system.provenance import version
from ...transport import wire
from ...transport.protocol import (
    Piece,
    RejectedResult,
    RoundOrder,
    RoundResult,
    RunDescription,
    WorkerInfo,
    as_tensor,
    checksums,
    packed,
    unpacked,
)
from ...transport.ray_cluster import K_LABELS, MEMORY_LABEL, ray
from .. import plan, teacher
from ..aggregator import Result
from ..evaluate import evaluate
from ..run import Progress, n_rows
from ..worker import TrainerPool


class Actor:
    """A process of a run that ends when no run has spoken to it for `patience` seconds."""

    def __init__(self, patience: float) -> None:
        self.heard = time.monotonic()
        self.patience = patience
        threading.Thread(target=self._end_alone, daemon=True).start()

    def _end_alone(self) -> None:
        while time.monotonic() - self.heard < self.patience:
            time.sleep(min(1.0, self.patience / 10))
        os._exit(0)

    @ray.method(concurrency_group="pulse")  # also while it works
    def ping(self) -> int:
        """The run is there; answers with this process's id."""
        self.heard = time.monotonic()
        return os.getpid()


def settings(run: RunDescription) -> tuple[config.Config, torch.dtype]:
    """The config of a run, once this process is known to have the same twistlm."""
    if run.version != version("twistlm"):
        raise ValueError(f"it has twistlm {version('twistlm')}, the run {run.version}")
    cfg = config.from_dict(run.config)
    if cfg.run.threads:
        torch.set_num_threads(cfg.run.threads)
    return cfg, torch.float64 if cfg.train.precision == "float64" else torch.float32


class Worker(Actor):
    """Trains what the owners of the central model send it."""

    run: RunDescription | None = None

    def enter(self, run: RunDescription, packed: teacher.Packed | None) -> WorkerInfo:
        """Build the run's model, unless it is built already."""
        self.heard = time.monotonic()
        if run != self.run:
            self.cfg, dtype = settings(run)
            device = pick_device("cpu" if self.cfg.run.device == "cpu" else "auto")
            described = AutoConfig.for_model(**run.model)
            template = AutoModelForCausalLM.from_config(
                described, dtype=dtype, trust_remote_code=False
            ).eval()
            cut = cut_model(template, self.cfg.blocks, device, dtype)
            labels = ray.get_runtime_context().get_node_labels()
            self.widths = {k: int(labels[K_LABELS[k]]) for k in KINDS if K_LABELS[k] in labels}
            if MEMORY_LABEL in labels:  # 0: what is free on its GPU
                n_bytes = int(labels[MEMORY_LABEL]) or torch.cuda.mem_get_info(device)[0]
                self.widths = plan.largest_k(self.cfg, template, packed is not None, n_bytes)
            frozen = teacher.unpack(packed, self.cfg, cut)
            self.trainers, self.run = TrainerPool(cut, self.cfg, None, frozen), run
        where = ray.get_runtime_context().get_node_id()
        return WorkerInfo(f"{socket.gethostname()}-{os.getpid()}", where, self.widths)

    def train(self, order: RoundOrder, tokens: Any, teacher_topk: Any, *pieces: Piece) -> tuple:
        """A round's local steps on a piece of every owner, tokens int32 [interval, batch, T] and
        what a teacher's cache holds for them, uint8 [interval, batch, T - 1, bytes] or None.

        Returns what it says of them, and a piece for every owner.
        """
        self.heard = time.monotonic()
        topk = None if teacher_topk is None else as_tensor(teacher_topk)
        sent, ids = self.receive(order, pieces, as_tensor(tokens), topk)
        result = self.steps(order, sent, ids, topk)
        self.heard = time.monotonic()
        split, new = self._split(order.blueprint, len(pieces)), result.buffer.to("cpu")
        parts = ((split.get(new, i), split.get(sent[:1], i)[0]) for i in range(len(pieces)))
        updates = [wire.up(self.cfg.run.wire, *part) for part in parts]
        return self.send(order, updates, float(result.stats.loss_sum))

    def receive(
        self,
        order: RoundOrder,
        pieces: Sequence[Piece],
        tokens: Tensor,
        teacher_topk: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The subnet's buffer [rows, n], and its batches."""
        rows, kind = n_rows(self.cfg), self.cfg.run.wire
        try:
            if checksums(tokens, teacher_topk) != order.checksums:
                raise RejectedResult("a wrong checksum")
            return self._join(order.blueprint, pieces, rows, kind), tokens.long()
        except RejectedResult:
            raise ValueError("what it was sent did not arrive as it was") from None

    def _split(self, blueprint: Blueprint, n: int) -> Split:
        segments = self.trainers.cut.segments
        return Ranges(segments, n).split(segments.index(blueprint))

    def _join(self, blueprint: Blueprint, pieces: Sequence[Piece], rows: int, kind: Wire) -> Tensor:
        """A subnet's first rows out of all owners' pieces; what one owner sent is not copied."""
        cut, split = self.trainers.cut, self._split(blueprint, len(pieces))
        parts = [
            wire.read_down(kind, unpacked(piece), (rows, split.size(i)), cut.dtype)
            for i, piece in enumerate(pieces)
        ]
        if len(parts) == 1:
            return parts[0]
        n = cut.segments.layout_of(blueprint).n_params
        buffer = torch.empty(rows, n, dtype=cut.dtype)
        for i, part in enumerate(parts):
            split.set_(buffer, i, part)
        return buffer

    def steps(
        self, order: RoundOrder, sent: Tensor, ids: Tensor, teacher_topk: Tensor | None
    ) -> Result:
        assert self.run is not None
        cut, gates = self.trainers.cut, as_tensor(order.gates)
        part = subnet_buffer(cut.segments, order.worker, order.blueprint, sent.to(cut.device))
        trainer = self.trainers.get(part.layout, "physical")
        return trainer.train(part, gates, ids, teacher_topk, order.round, self.run.total_steps)

    def send(self, order: RoundOrder, updates: list[Tensor], loss_sum: float) -> tuple:
        return RoundResult(order.round, loss_sum), *map(packed, updates)

    def rho(self, ids: Tensor, *pieces: Piece) -> Rho:
        """rho of every layer of the central model, whose weights all owners sent, on ids [1, T]."""
        full = self._evaluator(None, pieces, Progress()).full
        return measure_rho(full, ids.to(self.trainers.cut.device))

    def evaluate(self, text: Text, progress: Progress, *pieces: Piece) -> tuple[dict, str]:
        """Perplexities of the central model and its subnets."""
        self.heard = time.monotonic()
        evaluator = self._evaluator(text, pieces, progress)
        return evaluate(evaluator, self.cfg.run, progress, lambda: None)

    def _evaluator(self, text: Any, pieces: Sequence[Piece], progress: Progress) -> Evaluator:
        cut, t = self.trainers.cut, self.cfg.train
        weights = self._join(cut.block_map.full(), pieces, 1, "fp32").to(cut.device)
        block_map = cut.block_map.with_ranks(self.cfg.blocks, progress.order)
        central = Central(cut.segments, weights.clone(), None)
        return Evaluator(cut.template, block_map, central, text, t.scale, t.precision)


WORKER = Worker  # what a place is filled with

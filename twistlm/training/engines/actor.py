"""(4) A worker as a Ray actor: it keeps no data, and outlives a driver's crash."""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ... import config
from ...config import Kind
from ...model.central import subnet_buffer
from ...model.layout import cut_model
from ...system.device import pick_device
from ...system.provenance import version
from ...transport import wire
from ...transport.protocol import RoundOrder, RoundResult, RunDescription, WorkerInfo, checksum
from ...transport.ray_cluster import K_LABELS, ray
from .. import teacher
from ..aggregator import Result
from ..worker import TrainerPool


def as_tensor(array: Any) -> Tensor:
    """A numpy array of the object store as a tensor, not copied; nobody writes into it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is read-only
        return torch.from_numpy(array)


class Worker:
    """Trains what it is sent; ends when no run has spoken to it for `patience` seconds."""

    def __init__(self, patience: float) -> None:
        self.heard = time.monotonic()
        self.patience = patience
        self.run: RunDescription | None = None
        threading.Thread(target=self._end_alone, daemon=True).start()

    def _end_alone(self) -> None:
        while time.monotonic() - self.heard < self.patience:
            time.sleep(min(1.0, self.patience / 10))
        os._exit(0)

    @ray.method(concurrency_group="pulse")  # also while it trains
    def ping(self) -> int:
        """The run is there; answers with this process's id."""
        self.heard = time.monotonic()
        return os.getpid()

    def enter(self, run: RunDescription, packed: teacher.Packed | None) -> WorkerInfo:
        """Build the run's model, unless it is built already."""
        self.heard = time.monotonic()
        if run.version != version("twistlm"):
            raise ValueError(f"it has twistlm {version('twistlm')}, the run {run.version}")
        if run != self.run:
            self.cfg = config.from_dict(run.config)
            if self.cfg.run.threads:
                torch.set_num_threads(self.cfg.run.threads)
            device = pick_device("cpu" if self.cfg.run.device == "cpu" else "auto")
            dtype = torch.float64 if self.cfg.train.precision == "float64" else torch.float32
            described = AutoConfig.for_model(**run.model)
            template = AutoModelForCausalLM.from_config(
                described, dtype=dtype, trust_remote_code=False
            ).eval()
            cut = cut_model(template, self.cfg.blocks, device, dtype)
            frozen = teacher.unpack(packed, self.cfg, cut)
            self.trainers, self.run = TrainerPool(cut, self.cfg, None, frozen), run
        context = ray.get_runtime_context()
        labels = context.get_node_labels()
        widths: dict[Kind, int] = {}
        for kind in ("attn", "ffn"):
            if (label := labels.get(K_LABELS[kind])) is not None:
                widths[kind] = int(label)
        return WorkerInfo(f"{socket.gethostname()}-{os.getpid()}", context.get_node_id(), widths)

    def train(self, order: RoundOrder, weights: Any, tokens: Any, teacher_topk: Any) -> RoundResult:
        """A round's local steps on weights uint8 [n_bytes], tokens int32 [interval, batch, T] and
        what a teacher's cache holds for them, uint8 [interval, batch, T - 1, bytes] or None."""
        self.heard = time.monotonic()
        topk = None if teacher_topk is None else as_tensor(teacher_topk)
        sent, ids = self.receive(order, as_tensor(weights), as_tensor(tokens), topk)
        result = self.steps(order, sent, ids, topk)
        self.heard = time.monotonic()
        update = wire.up(self.cfg.run.wire, result.buffer.to("cpu"), sent[0])
        return self.send(order, update, float(result.stats.loss_sum))

    def receive(
        self, order: RoundOrder, weights: Tensor, tokens: Tensor, teacher_topk: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The subnet's buffer [rows, n], and its batches."""
        assert self.run is not None
        flat = tokens.reshape(-1).view(torch.uint8)
        came = (
            checksum(weights),
            checksum(flat),
            "" if teacher_topk is None else checksum(teacher_topk.view(-1)),
        )
        if came != (order.weights_checksum, order.tokens_checksum, order.teacher_checksum):
            raise ValueError("what it was sent did not arrive as it was")
        cut = self.trainers.cut
        where = cut.full.narrowed(cut.block_map, cut.block_map.widths(order.blueprint))
        shape = (self.run.rows, where.n_params)
        return wire.read_down(self.cfg.run.wire, weights, shape, cut.dtype), tokens.long()

    def steps(
        self, order: RoundOrder, sent: Tensor, ids: Tensor, teacher_topk: Tensor | None
    ) -> Result:
        assert self.run is not None
        cut, gates = self.trainers.cut, as_tensor(order.gates)
        source = sent.to(cut.device)
        part = subnet_buffer(cut.segments, order.worker, order.blueprint, source)
        trainer = self.trainers.get(part.layout, order.trainer)
        return trainer.train(part, gates, ids, teacher_topk, order.round, self.run.total_steps)

    def send(self, order: RoundOrder, update: Tensor, loss_sum: float) -> RoundResult:
        return RoundResult(order.round, update.numpy(), checksum(update), loss_sum)


WORKER = Worker  # what a place is filled with

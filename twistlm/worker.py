"""(4) A worker: its seat (model, flat buffers, optimizer) and its local steps."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .aggregator import Result, Stats
from .blocks import BlockMap
from .cluster import SeatKind
from .config import TrainConfig
from .data import Batches
from .dispatcher import Parcel
from .flat import Layout, gather_, scatter_
from .subnet import build, next_token_loss


class Seat:
    """One place to train subnets of one shape; it is loaded anew in every round.

    The optimizer always works on compact buffers of the subnet's own size. A masked or central seat
    runs the full model, gathers the gradient of its blocks, and scatters the new weights: absent
    blocks cannot move, whatever Adam's moments or the weight decay say.
    """

    def __init__(
        self,
        template: PreTrainedModel,
        block_map: BlockMap,
        full: Layout,
        layout: Layout,
        kind: SeatKind,
        cfg: TrainConfig,
        device: torch.device,
        dtype: torch.dtype,
        central_weights: Tensor | None = None,
    ):
        self.kind = kind
        self.layout = layout
        self.device = device
        self.autocast = autocast(cfg.precision, device)
        self.buffer = torch.zeros(3, layout.n_params, dtype=dtype, device=device)  # weights, m, v
        self.grad = torch.zeros(layout.n_params, dtype=dtype, device=device)
        if kind == "physical":
            self.full_weights, self.full_grad = self.buffer[0], self.grad
            self.subnet = build(template, block_map, layout, self.buffer[0], self.grad)
        else:
            if kind == "central":
                assert central_weights is not None
                self.full_weights = central_weights
            else:
                self.full_weights = torch.zeros(full.n_params, dtype=dtype, device=device)
            self.full_grad = torch.zeros(full.n_params, dtype=dtype, device=device)
            self.subnet = build(template, block_map, full, self.full_weights, self.full_grad)
        self.optimizer = self._adamw(cfg)
        # storages never move, so a compiled graph outlives every repartition
        self.forward = torch.compile(next_token_loss) if cfg.compile else next_token_loss

    def _adamw(self, cfg: TrainConfig) -> torch.optim.AdamW:
        """AdamW over flat slices, with its moments inside our buffer."""
        groups: list[dict] = []
        states: dict[Tensor, dict[str, Tensor]] = {}
        self.step_counts = []
        for spans, decay in ((self.layout.decayed, cfg.weight_decay), (self.layout.plain, 0.0)):
            params = []
            for start, end in spans:
                param = nn.Parameter(self.buffer[0, start:end])
                param.grad = self.grad[start:end]
                step = torch.zeros((), dtype=torch.float32, device=self.device)
                self.step_counts.append(step)
                states[param] = {
                    "step": step,
                    "exp_avg": self.buffer[1, start:end],
                    "exp_avg_sq": self.buffer[2, start:end],
                }
                params.append(param)
            if params:
                groups.append({"params": params, "weight_decay": decay})
        optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)
        optimizer.state.update(states)
        return optimizer

    def load(self, parcel: Parcel, scales: dict[str, float], step: int) -> None:
        """Take a parcel: weights, and the moments if they travel; `step` is Adam's count so far."""
        carried = parcel.buffer.shape[0]
        self.buffer[:carried].copy_(parcel.buffer)
        self.buffer[carried:].zero_()
        for count in self.step_counts:
            count.fill_(step if carried > 1 else 0)
        self.parcel = parcel
        self.subnet.scale_(scales)
        if self.kind != "physical":
            self.subnet.mask_(parcel.blueprint)
            self._to_model()

    def step(self, ids: Tensor, lr: float, clip: float) -> Tensor:
        """One local step; returns the loss (on the device, no sync)."""
        self.full_grad.zero_()
        loss = self.backward(ids)
        self.apply(lr, clip)
        return loss

    def backward(self, ids: Tensor, share: float = 1.0) -> Tensor:
        """Add the gradient of `share` times the loss to the buffers; returns the loss."""
        with self.autocast:
            loss = self.forward(self.subnet.model, ids)
        (loss * share).backward()
        return loss.detach()

    def apply(self, lr: float, clip: float) -> None:
        """Clip the gradient that lies in the buffers and make one AdamW step."""
        if self.kind != "physical":
            gather_(self.grad, self.full_grad, self.layout.n_shared, self.parcel.index)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if clip > 0:
            norm = torch.linalg.vector_norm(self.grad)
            self.grad.mul_((clip / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        if self.kind != "physical":
            self._to_model()

    def result(self) -> Tensor:
        """The trained buffer, with as many rows as came. A central seat puts the central weights back."""
        carried = self.parcel.buffer.shape[0]
        if self.kind == "central":
            scatter_(
                self.full_weights, self.parcel.buffer[0], self.layout.n_shared, self.parcel.index
            )
        return self.buffer[:carried]

    def _to_model(self) -> None:
        scatter_(self.full_weights, self.buffer[0], self.layout.n_shared, self.parcel.index)


def train(seat: Seat, batches: Batches, cfg: TrainConfig, round: int, total_steps: int) -> Result:
    """`interval` local steps of one worker; all of them are in what it returns."""
    parcel = seat.parcel
    losses = torch.zeros((), dtype=torch.float64, device=seat.device)
    first = round * cfg.interval
    for step in range(first, first + cfg.interval):
        ids = to_device(batches(parcel.worker, step), seat.device)
        losses += seat.step(ids, learning_rate(cfg, step, total_steps), cfg.clip)
    n_tokens = cfg.interval * batches.batch * batches.seq_len
    return Result(
        parcel.worker, seat.result(), parcel.index, Stats(float(losses), cfg.interval, n_tokens)
    )


def learning_rate(cfg: TrainConfig, step: int, total_steps: int) -> float:
    """Linear warm-up, then constant or cosine to a tenth, over local steps."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    if cfg.schedule == "constant":
        return cfg.lr
    done = (step - cfg.warmup) / max(1, total_steps - cfg.warmup)
    return cfg.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """bf16 autocast where asked for, or by `auto` on a GPU that has it."""
    if precision == "auto":
        enabled = device.type == "cuda" and torch.cuda.is_bf16_supported()
    else:
        enabled = precision == "bf16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def to_device(ids: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return ids.pin_memory().to(device, non_blocking=True)
    return ids

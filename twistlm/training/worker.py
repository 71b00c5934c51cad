"""(4) A worker: its trainer (model, flat buffers, optimizer) and its local steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..compute import graphs
from ..compute.attention import causal_
from ..compute.gradient import gradient_of
from ..compute.loss import AnyTeacher, loss_for
from ..compute.optimizer import AdamW
from ..config import Config, TrainConfig
from ..model.layout import CutModel, Layout, gather_, scatter_
from ..model.subnet import Gates, build, spread
from ..system.device import is_bf16, to_device
from ..transport.ranks import TrainerKind
from .aggregator import Result, Stats
from .dispatcher import SubnetBuffer


class LocalTrainer:
    """One place to train subnets of one shape; it is loaded anew in every round.

    The optimizer always works on compact buffers of the subnet's own size. A masked or central trainer
    runs the full model, gathers the gradient of its blocks, and scatters the new weights: absent
    blocks cannot move, whatever Adam's moments or the weight decay say.

    In bf16 the model reads rounded weights (`work`) and writes a bf16 gradient; master weights and
    moments stay in float32.
    """

    def __init__(
        self,
        cut: CutModel,
        layout: Layout,
        kind: TrainerKind,
        cfg: TrainConfig,
        central_weights: Tensor | None = None,
        teacher: AnyTeacher | None = None,
        *,
        fresh: bool = False,
    ):
        device, dtype = cut.device, cut.dtype
        self.kind, self.layout, self.device = kind, layout, device
        self.fast = graphs.is_on(cfg.compile, device)
        low = torch.bfloat16 if is_bf16(cfg.precision, device) else dtype
        self.buffer = torch.zeros(3, layout.n_params, dtype=dtype, device=device)  # weights, m, v
        self.grad = self._zeros(layout, low if self.fast else dtype)
        self.work = self.buffer[0] if low == dtype else self._zeros(layout, low)
        where, self.model_weights, self.model_grad = layout, self.work, self.grad
        if kind != "physical":
            where, self.model_grad = cut.full, self._zeros(cut.full, self.grad.dtype)
            if kind == "central" and low == dtype:
                assert central_weights is not None
                self.model_weights = central_weights
            else:
                self.model_weights = self._zeros(cut.full, low)
        gates: Gates = "all" if kind != "physical" or fresh else "cut"
        self.subnet = build(cut.template, cut.block_map, where, self.model_weights, gates=gates)
        causal_(self.subnet.model)
        self.subnet.model.requires_grad_()
        views = where.views(self.model_grad)
        loss = loss_for(cut.template, teacher)
        self.gradient = gradient_of(self.subnet.model, loss, views, self.fast, teacher)
        self.optimizer = AdamW(self.buffer, self.grad, self.work, layout, cfg, self.fast)
        self.losses = torch.zeros((), dtype=torch.float64, device=device)  # sum over steps
        # storages never move, so compiled and recorded graphs outlive every repartition
        self.ids = torch.empty(0, 0, dtype=torch.int64, device=device)
        self.teacher_topk: Tensor | None = None  # by a teacher's cache
        self.share, self.n_rows = 1.0, 1
        self._recorded: tuple = ()  # what the graphs below were recorded for
        self._coming: Iterator[tuple[Tensor, ...]] = iter(())
        self._backward = graphs.Replayed(self._differentiate, device, self.fast)
        self._apply = graphs.Replayed(self._optimize, device, self.fast)
        self._both = graphs.Replayed(self._step, device, self.fast)

    def _zeros(self, layout: Layout, dtype: torch.dtype) -> Tensor:
        return torch.zeros(layout.n_params, dtype=dtype, device=self.device)

    def load(self, part: SubnetBuffer, gates: Tensor, step: int) -> None:
        """Take a part: weights, and the moments if they travel; `step` is Adam's count so far.

        `gates` [steps, rows, held blocks] are the factors of every local step, or one for all of them.
        """
        self.part = part
        low = None if self.work.data_ptr() == self.buffer.data_ptr() else self.work
        part.unpack_(self.buffer[: part.rows], low)
        self.buffer[part.rows :].zero_()
        self.optimizer.start_(step if part.rows > 1 else 0)
        self.losses.zero_()
        self.gate(gates)
        if self.kind != "physical":
            self.before = self.buffer[0].clone() if self.kind == "central" else None
            self._to_model()

    def gate(self, gates: Tensor) -> None:
        """Bring the factors of all coming steps to the device at once."""
        if self.kind != "physical":
            gates = spread(self.subnet.block_map, self.part.blueprint, gates)
        self.n_rows = gates.shape[1]
        self._coming = zip(*self.subnet.split(gates[:, :, None]), strict=True)

    def _next_gates(self) -> None:
        """Refill the gates for this step, on the device; where no more come, the last ones stay."""
        if (values := next(self._coming, None)) is not None:
            torch._foreach_copy_(self.subnet.gate_tensors(self.n_rows), values)

    def step(self, ids: Tensor, lr: float, teacher_topk: Tensor | None = None) -> None:
        """One local step, with what a teacher's cache holds for it; nothing is read back."""
        if self.kind != "physical":
            self.backward(ids, teacher_topk=teacher_topk)
            self.apply(lr)
            return
        self._place(ids, 1.0, teacher_topk)
        self.optimizer.set_(lr)
        self._both()

    def _step(self) -> None:
        self._differentiate()
        self._optimize()

    def _place(self, ids: Tensor, share: float, teacher_topk: Tensor | None) -> None:
        """Put a batch where recorded graphs read it; another shape means other graphs."""
        shape = (
            ids.shape,
            share,
            self.n_rows,
            None if teacher_topk is None else teacher_topk.shape,
        )
        if self._recorded != shape:
            self._recorded = shape
            self.ids, self.share = torch.empty_like(ids, device=self.device), share
            self.teacher_topk = (
                None if teacher_topk is None else torch.empty_like(teacher_topk, device=self.device)
            )
            self._backward = graphs.Replayed(self._differentiate, self.device, self.fast)
            self._both = graphs.Replayed(self._step, self.device, self.fast)
        self._next_gates()
        self.ids.copy_(ids, non_blocking=True)
        if self.teacher_topk is not None and teacher_topk is not None:
            self.teacher_topk.copy_(teacher_topk, non_blocking=True)

    def backward(self, ids: Tensor, share: float = 1.0, teacher_topk: Tensor | None = None) -> None:
        """Set the gradient to that of `share` times the loss, and add the loss to `losses`."""
        self._place(ids, share, teacher_topk)
        self._backward()

    def _differentiate(self) -> None:
        self.losses += self.gradient(self.ids, self.share, self.teacher_topk)

    def apply(self, lr: float) -> None:
        """Clip the gradient that lies in the buffer and make one AdamW step."""
        if self.kind != "physical":
            gather_(self.grad[None], self.model_grad[None], self.part.segments, self.part.index)
        self.optimizer.set_(lr)
        self._apply()
        if self.kind != "physical":
            self._to_model()

    def _optimize(self) -> None:
        self.optimizer.step_()

    def result(self) -> Tensor:
        """The trained buffer, with as many rows as came. A central trainer puts the central weights back."""
        if self.kind == "central" and self.before is not None:
            self._to_model(self.before)
        return self.buffer[: self.part.rows]

    def _to_model(self, weights: Tensor | None = None) -> None:
        part = self.work if weights is None else weights.to(self.model_weights.dtype)
        scatter_(self.model_weights[None], part[None], self.part.segments, self.part.index)


class TrainerPool:
    """The trainers of one process: one is made when a subnet of its kind and shape first comes."""

    def __init__(
        self,
        cut: CutModel,
        cfg: Config,
        central_weights: Tensor | None = None,
        teacher: AnyTeacher | None = None,
        made: dict[tuple, LocalTrainer] | None = None,
    ):
        self.cut, self.cfg, self.central_weights = cut, cfg.train, central_weights
        self.teacher, self.fresh = teacher, cfg.blocks.masks != "round"
        self.made = {} if made is None else made

    def get(self, where: Layout, kind: TrainerKind, *, fresh: bool) -> LocalTrainer:
        """A trainer of subnets of this layout; `fresh` masks need gates in whole layers, too."""
        t = self.cfg
        of_config = (t.betas, t.eps, t.weight_decay, t.clip, t.precision, t.compile, t.distil)
        key = (kind, fresh, tuple(where.shapes.values()), of_config)
        if key not in self.made:
            weights, teacher = self.central_weights, self.teacher
            self.made[key] = LocalTrainer(self.cut, where, kind, t, weights, teacher, fresh=fresh)
        return self.made[key]

    def train(
        self,
        kind: TrainerKind,
        part: SubnetBuffer,
        gates: Tensor,
        ids: Tensor,
        round: int,
        total_steps: int,
        teacher_topk: Tensor | None = None,
    ) -> Result:
        """Load a part and train it; the result lies in the trainer until its next part."""
        trainer = self.get(part.layout, kind, fresh=self.fresh)
        trainer.load(part, gates, step=round * self.cfg.interval)
        return train(trainer, ids, self.cfg, round, total_steps, teacher_topk)


def train(
    trainer: LocalTrainer,
    ids: Tensor,
    cfg: TrainConfig,
    round: int,
    total_steps: int,
    teacher_topk: Tensor | None = None,
) -> Result:
    """`interval` local steps of one worker on ids [interval, batch, T]; all are in what it returns.

    `teacher_topk` [interval, batch, T - 1, bytes] is what a teacher's cache holds for them.
    Nothing here waits for a GPU: while it works on one worker's steps, the host prepares the next.
    """
    part = trainer.part
    first = round * cfg.interval
    steps = range(first, first + cfg.interval)
    batches = to_device(ids, trainer.device)
    lessons = [None] * len(ids) if teacher_topk is None else to_device(teacher_topk, trainer.device)
    for batch, lesson, step in zip(batches, lessons, steps, strict=True):
        trainer.step(batch, learning_rate(cfg, step, total_steps), lesson)
    stats = Stats(trainer.losses.clone(), cfg.interval, ids.numel())
    return Result(part.worker, trainer.result(), part.index, stats)


def learning_rate(cfg: TrainConfig, step: int, total_steps: int) -> float:
    """Linear warm-up, then constant or cosine to a tenth, over local steps."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    if cfg.schedule == "constant":
        return cfg.lr
    done = (step - cfg.warmup) / max(1, total_steps - cfg.warmup)
    return cfg.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))

"""(4) A worker's local steps: its model, flat buffers and optimizer."""

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
from ..model.central import Central, SubnetBuffer
from ..model.layout import CutModel, Layout, gather_, scatter_
from ..model.subnet import Gates, build, spread
from ..system.device import is_bf16, to_device
from ..transport.ranks import TrainerKind
from .aggregator import Result, Stats


class LocalTrainer:
    """Trains subnets of one shape; it is loaded anew in every round.

    The optimizer always works on compact buffers of the subnet's own size. The model that runs is,
    by the trainer's kind,

    physical  the subnet itself; one of all blocks may have the central model's own memory
    masked    a copy of the full model
    central   the central model itself: its weights are borrowed, and put back after the round

    From a full one the gradients of the subnet's blocks are gathered, and new weights scattered to
    it, so absent blocks cannot move, whatever Adam's moments or the weight decay say.

    In bf16 the model reads rounded weights (`work`) and writes a bf16 gradient; master weights and
    moments stay in float32.
    """

    def __init__(
        self,
        cut: CutModel,
        layout: Layout,
        kind: TrainerKind,
        cfg: TrainConfig,
        central: Tensor | None = None,  # its buffer, to train in place or to borrow from
        teacher: AnyTeacher | None = None,
        *,
        fresh: bool = False,
    ):
        device, dtype, is_full = cut.device, cut.dtype, kind != "physical"
        self.cfg, self.device, self.fast = cfg, device, graphs.is_on(cfg.compile, device)
        low = torch.bfloat16 if is_bf16(cfg.precision, device) else dtype
        # weights, m, v
        if is_full or central is None:
            self.buffer = torch.zeros(3, layout.n_params, dtype=dtype, device=device)
        else:
            self.buffer = central
        self.grad = torch.zeros_like(self.buffer[0], dtype=low if self.fast else dtype)
        self.work = self.buffer[0] if low == dtype else torch.zeros_like(self.grad, dtype=low)
        # weights and gradient of the full model [1, n_params]; None: the model is the subnet
        self.full_model: tuple[Tensor, Tensor] | None = None
        self.borrows = kind == "central" and low == dtype  # a rounded copy is a masked trainer's
        self.borrowed: Tensor | None = None  # the subnet's at the start of the round
        where, weights, grad = layout, self.work, self.grad
        if is_full:
            where, n = cut.full, cut.full.n_params
            if self.borrows:
                assert central is not None
                weights = central[0]
            else:
                weights = torch.zeros(n, dtype=low, device=device)
            grad = torch.zeros(n, dtype=self.grad.dtype, device=device)
            self.full_model = weights[None], grad[None]
        gates: Gates = "all" if is_full or fresh else "cut"
        self.subnet = build(cut.template, cut.block_map, where, weights, gates=gates)
        causal_(self.subnet.model)
        self.subnet.model.requires_grad_()
        loss, views = loss_for(cut.template, teacher), where.views(grad)
        how = (self.fast, teacher, cfg.recompute)
        self.gradient = gradient_of(self.subnet.model, loss, views, *how)
        self.optimizer = AdamW(self.buffer, self.grad, self.work, layout, cfg, self.fast)
        self.losses = torch.zeros((), dtype=torch.float64, device=device)  # sum over steps
        # storages never move, so compiled and recorded graphs outlive every repartition
        self.ids = torch.empty(0, 0, dtype=torch.int64, device=device)
        self.teacher_topk: Tensor | None = None  # by a teacher's cache
        self.share, self.n_rows = 1.0, 1
        self.gates: list[Tensor] = []  # of this step, [rows, 1, blocks] each
        self._coming: Iterator[tuple[Tensor, ...]] = iter(())  # those of the steps after it
        self._recorded: tuple = ()  # what the graphs below were recorded for
        self._optimize = graphs.Replayed(self.optimizer.step_, device, self.fast)

    def train(
        self,
        part: SubnetBuffer,
        gates: Tensor,
        ids: Tensor,
        teacher_topk: Tensor | None,
        schedule_round: int,
        total_steps: int,
    ) -> Result:
        """`interval` local steps on ids [interval, batch, T]; the result lies here until the next.

        `gates` [steps, rows, held blocks] are masks times scales, `teacher_topk` [interval, batch,
        T - 1, bytes] is what a teacher's cache holds. Nothing here waits for a GPU: while it works
        on one worker's steps, the host prepares the next.
        """
        n = self.cfg.interval
        first = schedule_round * n
        self.load(part, gates, first)
        batches = to_device(ids, self.device)
        topk = [None] * n if teacher_topk is None else to_device(teacher_topk, self.device)
        for batch, lesson, step in zip(batches, topk, range(first, first + n), strict=True):
            self.step(batch, learning_rate(self.cfg, step, total_steps), lesson)
        if self.borrowed is not None:  # the aggregator alone changes central weights
            self._write(self.borrowed)
        stats = Stats(self.losses.clone(), n, ids.numel())
        return Result(self.buffer[: part.rows], part.index, stats)

    def load(self, part: SubnetBuffer, gates: Tensor, step: int) -> None:
        """Take a subnet's weights, and moments if they came; `step` is Adam's count so far."""
        self.part = part
        low = None if self.work.data_ptr() == self.buffer.data_ptr() else self.work
        part.copy_to_(self.buffer[: part.rows], low)
        self.buffer[part.rows :].zero_()
        self.optimizer.start_(step if part.rows > 1 else 0)
        self.losses.zero_()
        self.gate(gates)
        self.borrowed = self.buffer[0].clone() if self.borrows else None
        self._write(self.work)

    def gate(self, gates: Tensor) -> None:
        """Bring the factors of all coming steps to the device: [steps, rows, held blocks]."""
        if self.full_model is not None:
            gates = spread(self.subnet.block_map, self.part.blueprint, gates)
        self.n_rows = gates.shape[1]
        # all tokens of a sequence alike: for every gate [steps, rows, 1, blocks], a step at a time
        self._coming = zip(*self.subnet.split(gates[:, :, None]), strict=True)

    def step(self, ids: Tensor, lr: float, teacher_topk: Tensor | None = None) -> None:
        """One local step, with what a teacher's cache holds for it; nothing is read back."""
        self.backward(ids, teacher_topk=teacher_topk)
        self.apply(lr)

    def backward(self, ids: Tensor, share: float = 1.0, teacher_topk: Tensor | None = None) -> None:
        """Set the gradient to that of `share` times the loss, and add the loss to `losses`."""
        self._set_batch(ids, share, teacher_topk)
        self._backward()

    def apply(self, lr: float) -> None:
        """Clip the gradient that lies in the buffer and make one AdamW step."""
        if self.full_model is not None:
            gather_(self.grad[None], self.full_model[1], self.part.segments, self.part.index)
        self.optimizer.set_(lr)
        self._optimize()
        self._write(self.work)

    def _write(self, weights: Tensor) -> None:
        """The subnet's weights [n_subnet] into the full model, where there is one."""
        if self.full_model is not None:
            scatter_(self.full_model[0], weights[None], self.part.segments, self.part.index)

    def _set_batch(self, ids: Tensor, share: float, teacher_topk: Tensor | None) -> None:
        """Put a batch where recorded graphs read it; another shape means other graphs."""
        topk_shape = None if teacher_topk is None else teacher_topk.shape
        shape = (ids.shape, share, self.n_rows, topk_shape)
        if self._recorded != shape:
            self._recorded, self.share = shape, share
            self.ids = torch.empty_like(ids, device=self.device)
            self.teacher_topk = None
            if teacher_topk is not None:
                self.teacher_topk = torch.empty_like(teacher_topk, device=self.device)
            n_rows = max(1, self.n_rows // self.cfg.accumulate)  # of a piece
            self.gates = self.subnet.gate_tensors(n_rows)
            if n_rows < self.n_rows:
                self.gates = [each.repeat(self.cfg.accumulate, 1, 1) for each in self.gates]
            self._backward = graphs.Replayed(self._differentiate, self.device, self.fast)
        # the gates of this step; where no more come, the last ones stay
        if (values := next(self._coming, None)) is not None:
            torch._foreach_copy_(self.gates, values)
        self.ids.copy_(ids, non_blocking=True)
        if self.teacher_topk is not None and teacher_topk is not None:
            self.teacher_topk.copy_(teacher_topk, non_blocking=True)

    def _differentiate(self) -> None:
        """The mean over the pieces of a batch is that over the batch: they are of one length."""
        n = self.cfg.accumulate
        for i, ids in enumerate(self.ids.chunk(n)):
            rows = slice(i * len(ids), (i + 1) * len(ids))
            topk = None if self.teacher_topk is None else self.teacher_topk[rows]
            if n > 1 and self.n_rows > 1 and self.gates:
                own = self.subnet.gate_tensors(len(ids))
                torch._foreach_copy_(own, [each[rows] for each in self.gates])
            self.losses += self.gradient(ids, self.share / n, topk, i > 0) / n


class TrainerPool:
    """The trainers of one process: one is made when a subnet of its kind and shape first comes."""

    def __init__(
        self,
        cut: CutModel,
        cfg: Config,
        central: Central | None = None,
        teacher: AnyTeacher | None = None,
    ):
        self.cut, self.cfg, self.central = cut, cfg.train, central
        self.teacher, self.fresh = teacher, cfg.blocks.masks != "round"
        self.made: dict[tuple, LocalTrainer] = {}

    def get(self, where: Layout, kind: TrainerKind, *, fresh: bool | None = None) -> LocalTrainer:
        """A trainer of subnets of this layout; `fresh` masks need gates in whole layers, too."""
        fresh = self.fresh if fresh is None else fresh
        key = (kind, fresh, tuple(where.shapes.values()))
        if key not in self.made:
            central, is_whole = self.central, where.shapes == self.cut.full.shapes
            is_its_own = central and (kind == "central" or (central.in_place and is_whole))
            more = (self.cfg, central.buffer if central and is_its_own else None, self.teacher)
            self.made[key] = LocalTrainer(self.cut, where, kind, *more, fresh=fresh)
        return self.made[key]


def learning_rate(cfg: TrainConfig, step: int, total_steps: int) -> float:
    """Linear warm-up, then constant or cosine to a tenth, over local steps."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    if cfg.schedule == "constant":
        return cfg.lr
    done = (step - cfg.warmup) / max(1, total_steps - cfg.warmup)
    return cfg.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))

"""AdamW over flat slices of one buffer: torch's own, or a compiled one for the GPU.

The compiled one clips and writes the rounded weights of the next forward pass on the way: one pass
over memory, 28 bytes a parameter in bf16.
"""

import torch
from torch import Tensor

from ..config import TrainConfig
from ..model.layout import Layout
from .graphs import compiled


class AdamW:
    """AdamW for one subnet; its moments are rows 1 and 2 of the buffer that holds the weights."""

    def __init__(
        self,
        buffer: Tensor,
        grad: Tensor,
        work: Tensor,
        layout: Layout,
        cfg: TrainConfig,
        fast: bool,
    ):
        self.buffer, self.grad, self.work, self.cfg = buffer, grad, work, cfg
        self.slices = [(span, cfg.weight_decay) for span in layout.decayed]
        self.slices += [(span, 0.0) for span in layout.plain]
        self.lr = torch.zeros((), dtype=torch.float32, device=buffer.device)
        self.count = torch.zeros((), dtype=torch.float32, device=buffer.device)
        self.rate, self.fast = 0.0, fast
        self.function = compiled(adamw_) if fast else adamw_
        self.norm = compiled(_norm) if fast else _norm

    def set_(self, lr: float) -> None:
        """The learning rate of the next step; on a GPU a graph reads it from memory."""
        self.rate = lr
        self.lr.fill_(lr)

    def start_(self, count: int) -> None:
        """How many steps the moments have seen."""
        self.count.fill_(count)

    @torch.no_grad()
    def step_(self) -> None:
        self.count += 1
        factor = None
        if self.cfg.clip > 0:
            factor = (self.cfg.clip / (self.norm(self.grad) + 1e-6)).clamp(max=1.0)
        if not self.fast and factor is not None:
            self.grad.mul_(factor)
        for (start, end), decay in self.slices:
            span = slice(start, end)
            weights, m, v = self.buffer[:, span]
            if self.fast:
                self.function(
                    weights, m, v, self.grad[span], self.work[span], self.lr, self.count, factor,
                    betas=self.cfg.betas, eps=self.cfg.eps, decay=decay,
                )  # fmt: skip
                continue
            b1, b2 = self.cfg.betas
            torch._fused_adamw_(
                [weights], [self.grad[span]], [m], [v], [], [self.count], lr=self.rate, beta1=b1,
                beta2=b2, weight_decay=decay, eps=self.cfg.eps, amsgrad=False, maximize=False,
            )  # fmt: skip
        if not self.fast and self.work.data_ptr() != self.buffer.data_ptr():
            self.work.copy_(self.buffer[0])


def adamw_(
    weights: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    work: Tensor,  # the weights as the model reads them
    lr: Tensor,
    n_steps: Tensor,  # with this one
    factor: Tensor | None,  # of the gradient, where it is clipped
    *,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """w <- (1 - lr*decay) w - lr m' / (sqrt(v') + eps), m' and v' free of their start at 0."""
    grad = grad.to(weights.dtype)
    if factor is not None:
        grad = grad * factor
    new_m = m + (1 - betas[0]) * (grad - m)
    new_v = betas[1] * v + (1 - betas[1]) * grad * grad
    rate = lr / (1 - betas[0] ** n_steps)
    spread = (new_v.sqrt() / (1 - betas[1] ** n_steps).sqrt()) + eps
    new = weights * (1 - lr * decay) - rate * (new_m / spread)
    m.copy_(new_m)
    v.copy_(new_v)
    weights.copy_(new)
    if work.dtype != weights.dtype:  # otherwise it is the same memory
        work.copy_(new)


def _norm(grad: Tensor) -> Tensor:
    exact = grad.float() if grad.dtype in (torch.bfloat16, torch.float16) else grad
    return torch.linalg.vector_norm(exact)

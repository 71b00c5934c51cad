"""bench train --curve: the same steps with our local step and with stock Hugging Face in float32.

Both start from the same weights and read the same batches; what differs is rounding. Single losses
scatter, so they are compared as means over the last `SMOOTH` steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...compute.loss import next_token_loss
from ...config import Config
from ...data.builtin import resolve
from ...data.stream import Batches
from ...data.token_file import open_tokens
from ...model import huggingface
from ...model.layout import cut_model
from ...system.device import pick_device
from ...system.provenance import describe_run
from ...system.terminal import progress
from ...training import checkpoint
from ...training.worker import LocalTrainer, learning_rate

SMOOTH = 20  # steps


@dataclass(frozen=True)
class Curve:
    """Losses step by step."""

    ours: tuple[float, ...]
    stock: tuple[float, ...]
    difference: float  # the largest relative one between the smoothed losses
    run: dict[str, Any]


def curve(cfg: Config, n_steps: int, quiet: bool = False) -> Curve:
    """Train the full model of a config for `n_steps`, twice."""
    device = pick_device(cfg.run.device)
    template = huggingface.load(checkpoint.resolved(cfg).model, cfg.run.seed)
    file = open_tokens(resolve(cfg.data.train, "train"))
    file.check(cfg.data.seq_len, huggingface.vocab_size(template))
    batches = Batches(file, cfg.data.seq_len, 1, cfg.train.batch, cfg.run.seed)
    with progress(quiet) as bar:
        task = bar.add_task("bench train", total=2 * n_steps, note="ours")
        trainer = _trainer(template, cfg, device)
        ours = []
        for step in range(n_steps):
            trainer.losses.zero_()
            trainer.step(batches(0, step).to(device), learning_rate(cfg.train, step, n_steps))
            ours.append(float(trainer.losses))
            bar.advance(task)
        bar.update(task, note="Hugging Face, float32, eager")
        stock = []
        for step, loss in enumerate(_stock(template, cfg, device, batches, n_steps)):
            stock.append(loss)
            bar.update(task, completed=n_steps + step + 1)
    pairs = zip(_smooth(ours), _smooth(stock), strict=True)
    difference = max(abs(a - b) / b for a, b in pairs)
    return Curve(tuple(ours), tuple(stock), difference, describe_run() | {"config": asdict(cfg)})


def _trainer(template: PreTrainedModel, cfg: Config, device: torch.device) -> LocalTrainer:
    """A full trainer that holds the template's weights."""
    cut = cut_model(template, cfg.blocks, device, torch.float32)
    trainer = LocalTrainer(cut, cut.full, "physical", cfg.train)
    for name, view in cut.full.views(trainer.buffer[0]).items():
        view.copy_(huggingface.state(template)[name].detach())
    trainer.work.copy_(trainer.buffer[0])
    return trainer


def stock_model(template: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Hugging Face's model with weights of its own, to be trained."""
    model = huggingface.clone_structure(template)
    huggingface.bind_(model, {n: p.detach().clone() for n, p in template.named_parameters()})
    nn.Module.to(model, device).requires_grad_()
    return model


def _stock(
    template: PreTrainedModel, cfg: Config, device: torch.device, batches: Batches, n_steps: int
):
    """Stock model, loss, clipping and AdamW, in float32 (no tf32)."""
    t, model = cfg.train, stock_model(template, device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": t.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=t.lr, betas=t.betas, eps=t.eps)
    for step in range(n_steps):
        for group in adamw.param_groups:
            group["lr"] = learning_rate(t, step, n_steps)
        loss = next_token_loss(model, batches(0, step).to(device))
        loss.backward()
        if t.clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), t.clip)
        adamw.step()
        adamw.zero_grad()
        yield float(loss.detach())


def sentence(made: Curve) -> str:
    """The last losses, and how far the smoothed ones are apart."""
    return (
        f"{len(made.ours)} steps: loss {made.ours[-1]:.4f}, stock {made.stock[-1]:.4f}; smoothed "
        f"over {SMOOTH} steps they differ by at most {made.difference:.3%}"
    )


def _smooth(values: list[float]) -> list[float]:
    windows = [values[max(0, i + 1 - SMOOTH) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]

"""Before the first round: model, data, block map and central state, all checked or resumed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from .. import config as configs
from ..compute.perplexity import Evaluator, Text
from ..config import Config
from ..data.builtin import resolve
from ..data.leases import Leases
from ..data.stream import Batches
from ..data.token_file import open_tokens
from ..model import central as centrals
from ..model import families, generator, huggingface
from ..model.blocks import BlockMap, widths_of_ratio
from ..model.central import Central
from ..model.layout import Layout, Runs, layout, runs
from ..model.subnet import Rho
from ..system import provenance
from ..system.signals import Stop
from ..transport.hub import Hub
from ..transport.ranks import Cluster
from . import checkpoint
from . import resume as resumes
from .dispatcher import Deal
from .engines.sharded import Shard, spread
from .worker import Seats


@dataclass
class Run:
    """Everything one process holds during a run; `central` is on the central rank only."""

    cfg: Config
    cluster: Cluster
    template: PreTrainedModel
    block_map: BlockMap
    runs: Runs
    central: Central | None
    batches: Batches
    n_rounds: int  # as planned, when nothing is lost: the schedule's length
    held: generator.Held
    rho: Rho = field(default_factory=dict)
    start: int = 0  # the first round to run
    leases: Leases = field(default_factory=Leases)  # before the next round; the same on every rank
    evaluator: Evaluator | None = None
    ahead: Deal | None = None  # the next round's
    hub: Hub | None = None  # on the central rank, where workers are other processes
    shard: Shard | None = None  # with it, `central` is a copy that is filled when it is needed
    stop: Stop = field(default_factory=Stop)

    @cached_property
    def seats(self) -> Seats:
        weights = self.central.weights if self.central is not None else None
        return Seats(
            self.template, self.block_map, self.full, self.cfg.train, self.cluster.device, self.dtype,
            weights,
        )  # fmt: skip

    @property
    def full(self) -> Layout:
        return self.runs.full

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.cfg.train.precision == "float64" else torch.float32

    @property
    def rows(self) -> int:
        carry = self.cfg.train.moments == "carry" or self.cfg.train.method != "twist"
        return len(centrals.ROWS) if carry else 1

    @property
    def total_steps(self) -> int:
        return self.n_rounds * self.cfg.train.interval

    def end(self, n_done: int) -> int:
        """How many rounds there will be, seen after `n_done`.

        Epochs last until their sequences are trained: results that were lost take rounds of their own.
        """
        t, leases = self.cfg.train, self.leases
        if t.rounds:
            return t.rounds
        n_left = t.epochs * self.batches.n_sequences - (leases.next - len(leases.returned))
        return n_done + max(0, int(n_left // (t.n_workers * t.batch * t.interval)))


def set_up(cfg: Config, cluster: Cluster, resume: bool, quiet: bool) -> Run:
    """Model, data, block map and central state, all checked before the first step."""
    if cfg.train.method != "twist" and cfg.run.variant in ("true", "sharded"):
        raise ValueError(
            f"train.method = {cfg.train.method!r} trains one model on every rank: use run.variant local, "
            f"masked or hybrid"
        )
    out = Path(cfg.run.out)
    folder = out / "checkpoints"
    if not resume and any(folder.glob("round-*")):
        raise ValueError(
            f"run.out = {cfg.run.out!r} already holds a run: add --resume, or choose another folder"
        )
    saved = resumes.find(folder, cfg, quiet) if resume and cluster.is_central else None
    template = (
        huggingface.load(cfg.model, cfg.run.seed) if saved is None else checkpoint.template(saved)
    )
    if cfg.train.precision == "float64":
        template = template.double()
    block_map = families.partition(template, cfg.blocks)
    if cfg.train.method == "twist":
        generator.check(block_map, cfg.blocks, cfg.train.n_workers)
    elif cfg.train.method == "dropout":
        generator.check_dropout(block_map, cfg.blocks)
    for ratio in cfg.run.eval_ratios:
        widths_of_ratio(block_map, ratio)
    if not cluster.is_central:
        cluster.barrier()  # the central rank goes first: it makes the built-in corpus once for all
    data = open_tokens(resolve(cfg.data.train, "train"))
    valid = open_tokens(resolve(cfg.data.valid, "valid"))
    if cluster.is_central:
        cluster.barrier()
    tokenizer = saved.tokenizer_sha256 if saved else data.meta.tokenizer_sha256
    positions = getattr(template.config, "max_position_embeddings", None)
    if positions is not None and cfg.data.seq_len > positions:
        raise ValueError(f"data.seq_len = {cfg.data.seq_len}: the model has {positions} positions")
    for file in (data, valid):
        file.check(cfg.data.seq_len, huggingface.vocab_size(template), tokenizer)
    t = cfg.train
    batches = Batches(data, cfg.data.seq_len, t.n_workers, t.batch, cfg.run.seed)
    n_rounds = t.rounds or batches.n_rounds(t.epochs, t.interval)
    if n_rounds < 1:
        raise ValueError(
            f"train.rounds = {t.rounds} and train.epochs = {t.epochs} make no round: one round is "
            f"{t.n_workers} workers x {t.interval} steps x {t.batch} sequences, the data has "
            f"{data.n_sequences(cfg.data.seq_len)}"
        )
    if saved is not None and t.rounds and saved.round > t.rounds:
        raise ValueError(
            f"{saved.path} has done {saved.round} rounds already, more than train.rounds = {n_rounds}"
        )
    shapes = huggingface.shapes(template)
    nothing_held = {group.name: [0] * group.n_blocks for group in block_map.groups}
    whole = runs(layout(block_map, shapes), block_map, cluster.device)
    run = Run(cfg, cluster, template, block_map, whole, None, batches, n_rounds, nothing_held)
    if cluster.is_central:
        outer = t.method == "twist" and t.nesterov() is not None
        if saved is not None:
            run.central = checkpoint.restore(saved, template, block_map, cluster.device)
        else:
            run.central = centrals.create(
                huggingface.state(template),
                shapes,
                block_map,
                carry=run.rows > 1,
                outer=outer,
                device=cluster.device,
            )
            _write_config(out, cfg)
        run.held, run.rho, run.start = run.central.held, run.central.rho, run.central.round
        run.leases = run.central.leases
        if saved is not None and saved.round < run.end(saved.round):
            resumes.log_(out, saved, cfg)
        text = Text(valid, cfg.data.seq_len, cfg.run.eval_tokens)
        run.evaluator = Evaluator(
            template, block_map, run.central, text, scale=t.scale, precision=t.precision
        )
    _share_start(run)
    if cfg.run.variant == "sharded":
        outer = t.nesterov() is not None
        run.shard = spread(run.central, whole, cluster, run.rows, outer, run.dtype, cfg.run.wire)
    return run


def _share_start(run: Run) -> None:
    """Tell every rank where to begin: the round, the data leases, how often each block was dealt."""
    counts = [float(count) for group in run.block_map.groups for count in run.held[group.name]]
    n_returned = len(run.leases.returned)
    first = run.cluster.broadcast([run.start, run.leases.next, n_returned, *counts])
    run.start, next_, n_returned = (int(value) for value in first[:3])
    returned = [float(place) for place in run.leases.returned] or [0.0] * n_returned
    if returned:
        returned = run.cluster.broadcast(returned)
    run.leases = Leases(next_, tuple(int(place) for place in returned))
    told = iter(first[3:])
    for group in run.block_map.groups:
        run.held[group.name][:] = [int(next(told)) for _ in range(group.n_blocks)]


def _write_config(out: Path, cfg: Config) -> None:
    out.mkdir(parents=True, exist_ok=True)
    described = {"config": configs.to_dict(cfg), **provenance.describe_run()}
    (out / "run.json").write_text(json.dumps(described, indent=1) + "\n")

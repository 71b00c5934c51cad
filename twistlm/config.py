"""Every key of a training run, and what it means: `docs/config.md` is made of this file."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from .fields import check, limited
from .presets import build, of_today, overridden, preset_names, read_table  # noqa: F401

Kind = Literal["attn", "ffn"]
Setting = Literal["attn", "ffn", "both"]
Method = Literal["twist", "dense", "dropout"]
Wire = Literal["fp32", "bf16", "int8", "int4"]
ActivationScale = Literal["sqrt", "none", "inverse", "measured"]

MOST_SEQUENCES = 1 << 24  # of a round


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    weights: str = "random"
    """`random`, a run folder (its newest checkpoint), a Hugging Face folder or hub id, `gguf:FILE`,
    or `gguf:PACKAGE/FILE` for a file that an installed Python package ships."""
    type: str = "gpt2"
    """Hugging Face model_type; with `random` weights it is built, otherwise it is checked."""
    config: dict[str, Any] = field(default_factory=dict)
    """Hugging Face config attributes that differ from the type's defaults."""


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from: stems written by `twistlm prepare`, or `builtin:python-docs`."""

    train: str = "builtin:python-docs"
    """Stem of the training tokens (`STEM.bin` and `STEM.json`)."""
    valid: str = "builtin:python-docs"
    """Stem of the tokens that perplexity is measured on."""
    seq_len: int = limited(1024, least=2)
    """Tokens in a sequence."""
    planned_sequences: int = limited(0, least=0)
    """Training sequences that `twistlm plan` reckons with while the token file is not there."""


@dataclass(frozen=True)
class BlocksConfig:
    """What is partitioned into blocks, and how workers get them."""

    setting: Setting = "both"
    """Which kinds of layer are partitioned."""
    attn_by: Literal["auto", "head", "group", "query"] = "auto"
    """An attention block is a head, a kv group, or one query head of every kv head."""
    n_ffn: int = limited(12, above=0)
    """R: blocks in an FFN layer."""
    sort: bool = False
    """Before the first round, sort the neurons of every FFN layer by importance, so that its first
    block has the most important ones. The model computes what it did. For pretrained models, whose
    nested tickets gain a lot and whose random ones lose."""
    k_attn: tuple[int, ...] = (6,)
    """Attention blocks in a subnet: one K, several (cycled over rounds), or one per worker."""
    k_ffn: tuple[int, ...] = (6,)
    """FFN blocks in a subnet, in the same three ways."""
    widths: Literal["cycle", "worker"] = "cycle"
    """Whether several K are cycled over rounds or belong to one worker each."""
    common_attn: tuple[int, ...] = ()
    """C: attention blocks that every worker and every ticket holds."""
    common_ffn: tuple[int, ...] = ()
    """C: FFN blocks that every worker and every ticket holds."""
    shared_first: int = 2
    """First layers that are not partitioned."""
    shared_last: int = 2
    """Last layers that are not partitioned."""
    deal: Literal["random", "fixed", "order", "first"] = "random"
    """Who holds what. `random`: random blocks. `order`: one of the smaller workers, in turn, holds
    the first K of the order of blocks. `first`: all of them do, but for those who must hold the
    rest. In both a whole worker takes the masks too wide for others. `fixed`, a control: the first
    round's deal for ever."""
    masks: Literal["round", "step", "sequence"] = "round"
    """A worker trains all blocks that it holds for the whole `round`, or a part of them that is
    drawn anew for every local `step` or for every `sequence`."""
    mask_attn: tuple[int, ...] = ()
    """Attention blocks in such a part: widths that steps or sequences take in turn. A worker that
    holds fewer uses all."""
    mask_ffn: tuple[int, ...] = ()
    """FFN blocks in such a part, in the same way: as many widths as for attention, pair by pair."""
    mask_depth: tuple[int, ...] = limited((), least=0)
    """Layers that such a part does without, in the same way: random ones, or, in the masks that
    `nested` speaks of, the last of an order of layers: that of the loss without each."""
    nested: float = limited(0.0, least=0, most=1)
    """Share of these masks that keep the first blocks of one order instead of random ones. The
    order is scored once (mask-Fisher), before the first round or where a resumed run first needs
    it, and `--pick nested` cuts tickets along it."""

    def k(self, kind: Kind) -> tuple[int, ...]:
        return self.k_attn if kind == "attn" else self.k_ffn

    def common(self, kind: Kind) -> tuple[int, ...]:
        return self.common_attn if kind == "attn" else self.common_ffn

    def mask(self, kind: Kind) -> tuple[int, ...]:
        return self.mask_attn if kind == "attn" else self.mask_ffn


@dataclass(frozen=True)
class TrainConfig:
    """The optimization."""

    method: Method = "twist"
    """TwIST rounds, or a control on the same tokens: data parallel, plain (`dense`) or with a fresh
    random mask of K blocks in every step, or as `blocks.masks` says (`dropout`)."""
    n_workers: int = limited(4, above=0)
    """S: workers, each of which trains one subnet in a round."""
    rounds: int = limited(0, least=0)
    """Rounds to train; 0 takes them from `epochs`."""
    epochs: float = limited(0.0, least=0)
    """Passes over the training tokens, used when `rounds` is 0."""
    interval: int = limited(15, above=0)
    """Local steps of each worker in a round."""
    batch: int = limited(2, above=0)
    """Sequences in a local step."""
    lr: float = limited(1e-4, above=0)
    """Peak learning rate of the local AdamW."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: constant, or cosine down to a tenth over all local steps."""
    warmup: int = limited(0, least=0)
    """Local steps of linear warm-up."""
    betas: tuple[float, float] = limited((0.9, 0.999), least=0, below=1)
    """AdamW's decay rates."""
    eps: float = limited(1e-8, least=0)
    """AdamW's epsilon."""
    weight_decay: float = limited(0.0, least=0)
    """Decoupled weight decay of matrices (never of biases and norms)."""
    clip: float = limited(0.0, least=0, most=math.inf)
    """Largest norm of a gradient; 0 switches clipping off."""
    moments: Literal["carry", "reset"] = "carry"
    """Whether Adam's moments travel with their blocks or start anew in each round."""
    outer: str = "none"
    """`none` (the mean), or `nesterov(lr, momentum)` on the round's pseudo-gradient."""
    scale: ActivationScale = "sqrt"
    """What a subnet's layer output is multiplied by: sqrt(N/K), 1, N/K, or the measured ratio."""
    teacher: str = "none"
    """`none`, or a frozen model whose predictions are learned, too: `start` (the weights
    that training starts from), a run folder, a Hugging Face folder or hub id, with the same
    tokenizer; `cache` reads what `twistlm prepare --teacher` has stored beside the tokens."""
    distil: float = limited(0.9, least=0, most=1)
    """With a teacher: the weight of KL(teacher || subnet); the text's own loss has the rest."""
    precision: Literal["auto", "float32", "bf16", "float64"] = "auto"
    """`bf16` trains a rounded copy of float32 weights; `auto` takes it on a GPU that has it."""
    compile: Literal["auto", "true", "false"] = "auto"
    """Compile the local step (once per width) and record it as a CUDA graph; `auto`: on a GPU."""
    recompute: bool = False
    """Keep only the inputs of each layer for the backward pass, which computes the rest again: far
    less memory for activations, a third more computation, the same gradients."""
    accumulate: int = limited(1, above=0)
    """Pieces of a local step's batch that pass one after the other, their gradients added up: the
    same step with as much less memory for activations. It must divide `batch`."""

    def nesterov(self) -> tuple[float, float] | None:
        """(lr, momentum) of the outer optimizer; None for the plain mean, and for controls."""
        if self.outer == "none":
            return None
        match = re.fullmatch(r"nesterov\(([^,]+),([^,]+)\)", self.outer)
        with suppress(ValueError, AttributeError):  # no numbers, no match
            lr, momentum = map(float, match.groups())  # type: ignore[union-attr]
            if 0 < lr < math.inf and 0 <= momentum < 1:
                return (lr, momentum) if self.method == "twist" else None
        legal = "'none', or 'nesterov(lr, momentum)' with lr > 0 and 0 <= momentum < 1"
        raise ValueError(f"train.outer = {self.outer!r}: use {legal}")


@dataclass(frozen=True)
class RunConfig:
    """Where and how the rounds run."""

    out: str = "runs/train"
    """Folder of this run: checkpoints, metrics, config."""
    seed: int = limited(0, least=0)
    """Initial weights, the blocks of every round, batches and random subnets follow from it."""
    variant: Literal["local", "ray", "masked", "true", "hybrid", "sharded"] = "local"
    """`local`: one process plays all workers; `ray`: they come and go. As torchrun's ranks:
    `masked` (full models), `hybrid` (smaller ones), `true` (and a rank for the central model),
    `sharded` (each owns a part of the central model)."""
    wire: Wire = "fp32"
    """What weights and moments travel as between processes: `fp32` is exact; `bf16`; with `int8`
    weights go to workers in bf16, and changes and moments travel in 8 bits; with `int4` changes and
    first moments in 4. `local` sends nothing and rounds as with one owner."""
    seat: Literal["physical", "masked"] = "physical"
    """What `local` workers train: a smaller dense model, or the full one with masks."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    central: Literal["device", "host"] = "device"
    """Where `local` has the central model and its sums, 24 bytes a parameter: on the `device`, or
    in the memory of the `host`, from which every worker's subnet is copied and to which it goes."""
    threads: int = limited(0, least=0, most=1024)
    """CPU threads; 0 leaves torch's choice. Bitwise equal runs need equal threads."""
    silence: float = limited(60.0, above=0)
    """Seconds of silence from a rank of torchrun after which the others name it and end."""
    eval_every: int = limited(0, least=-1)
    """Rounds between evaluations; 0 evaluates at the end only, -1 never."""
    eval_ratios: tuple[str, ...] = ("6/12",)
    """Sizes of the random subnets that are evaluated."""
    eval_n: int = limited(20, above=0)
    """Random subnets behind a number."""
    eval_tokens: int = limited(0, least=0)
    """Tokens of the validation file to use; 0 takes all."""
    save_every: int = limited(50, least=0)
    """Rounds between checkpoints; the last round is always saved, 0 saves only that."""
    keep: int = limited(2, least=2)
    """Checkpoints to keep, at least 2: the newest may turn out damaged."""


@dataclass(frozen=True)
class RayConfig:
    """`run.variant = "ray"`: workers that come and go, as actors of a Ray cluster."""

    address: str = ""
    """host:port of the cluster's head. Empty: the variable RAY_ADDRESS, or else a Ray of this
    machine alone that ends with the run."""
    open: bool = False
    """Accept a cluster beyond loopback without a token: whoever reaches it can run code on it."""
    owners: int = limited(0, least=0)
    """Actors that keep the central model, each a range of it and a copy of another's; 0: one on
    every machine with workers."""
    min_workers: int = limited(1, above=0)
    """A round with fewer results is not committed."""
    wait: float = limited(60.0, least=0)
    """Seconds that a run waits at its start for all S workers, then it begins with those here."""
    floor: float = limited(30.0, above=0)
    """Least seconds of a round's deadline, which is 3 times the median of the last rounds; 10 times
    this for the first round."""
    patience: float = limited(600.0, least=0)
    """Seconds below `min_workers` after which a run ends, and without a run a worker does."""


@dataclass(frozen=True)
class Config:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    blocks: BlocksConfig = field(default_factory=BlocksConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def check(self) -> Config:
        """Refuse values that no model could make sense of; a model's limits are checked later."""
        for section in dataclasses.fields(self):
            check(getattr(self, section.name), section.name)
        t = self.train
        if (n := t.n_workers * t.interval * t.batch) > MOST_SEQUENCES:  # dealt out as a list
            what = "train.n_workers x train.interval x train.batch"
            legal = f"legal are at most {MOST_SEQUENCES:,}"
            raise ValueError(f"{what} = {n:,} sequences in a round: {legal}")
        if t.batch % t.accumulate:
            what = f"train.accumulate = {t.accumulate}"
            raise ValueError(f"{what}: must divide train.batch = {t.batch}")
        if not self.run.out.strip():  # it would be the current folder
            raise ValueError(f"run.out = {self.run.out!r}: name a folder")
        weights, teacher = self.model.weights, t.teacher
        if not weights.strip():
            raise ValueError(f"model.weights = {weights!r}: name a folder, a hub id or 'random'")
        if not teacher.strip():
            raise ValueError(f"train.teacher = {teacher!r}: name a folder, a hub id or 'none'")
        if teacher == "start" and weights == "random":
            both = "train.teacher = 'start' with model.weights = 'random'"
            raise ValueError(f"{both}: untrained weights teach nothing; take 'none', or a model")
        if (least := self.ray.min_workers) > t.n_workers:
            most = f"must not exceed train.n_workers = {t.n_workers}"
            raise ValueError(f"ray.min_workers = {least}: {most}")
        self.train.nesterov()
        return self


def load(source: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a preset, a TOML file or a run folder, with `section.key=value` overrides."""
    return from_dict(overridden(read_table(source), overrides, Config))


def override(cfg: Config, overrides: Sequence[str]) -> Config:
    """The config with `section.key=value` overrides applied."""
    return from_dict(overridden(to_dict(cfg), overrides, Config))


def from_dict(table: dict[str, Any]) -> Config:
    """A checked config; keys that are left out keep their defaults."""
    return build(Config, table).check()


def from_record(table: dict[str, Any]) -> Config:
    """The config in a checkpoint or report, whatever keys there were when it was written."""
    return from_dict(of_today(table))


def to_dict(config: Config) -> dict[str, Any]:
    """Plain data for JSON; `from_dict` reads it back."""
    return dataclasses.asdict(config)

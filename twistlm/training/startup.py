"""Before the first round: model, data, block map and central state, all checked or resumed.

A run that goes on needs the same model, data and seed. S, K, the batch and all other knobs may
change, since a checkpoint is always a round boundary and the data's ledger counts sequences.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import config
from ..compute.perplexity import Evaluator, Text
from ..compute.slopes import mask_fisher, mask_slopes, order_of, order_of_layers, sort_neurons_
from ..config import Config
from ..data.builtin import resolve
from ..data.stream import Batches
from ..data.token_file import TokenFile, open_tokens
from ..model import depth, generator, huggingface, masks
from ..model.blocks import BlockMap, widths_of_ratio
from ..model.central import Central, create, on_host
from ..model.generator import LAYERS, Order
from ..model.layout import CutModel, cut_model
from ..system import terminal
from ..system.files import whole_file
from ..system.provenance import describe_run
from ..system.terminal import console
from ..transport.ranks import Cluster
from . import checkpoint, teacher
from .checkpoint import Checkpoint
from .run import Progress, Run, broadcast, dtype_of, is_in_place, n_rows

# what may not change when a run goes on
REFUSED = {"model", "data", "blocks.sort", "run.seed"}
REFUSED |= {"train.method", "train.moments", "train.precision", "train.teacher"}
N_SCORED = 64  # training sequences that the order of blocks is scored on


def set_up(cfg: Config, cluster: Cluster, resumes: bool, quiet: bool) -> tuple[Run, Progress]:
    """Everything checked before the first step: the run, and where it stands."""
    _check_engine(cfg)
    cfg = checkpoint.resolved(cfg)
    saved = _find(cfg, resumes, cluster)
    cut = _cut(cfg, saved, cluster.device)
    train, valid = _open_data(cfg, cluster)
    tokenizer = saved.manifest["tokenizer_sha256"] if saved else train.meta.tokenizer_sha256
    for file in (train, valid):
        file.check(cfg.data.seq_len, huggingface.vocab_size(cut.template), tokenizer)
    batches = Batches(train, cfg.data.seq_len, cfg.train.batch, cfg.run.seed)
    n_rounds = _n_rounds(cfg, batches, saved)
    frozen, named, cache = teacher.load(cfg, cut, train, saved is not None)
    batches = replace(batches, teacher_cache=cache)
    run = Run(cfg, cluster, cut, batches, n_rounds, teacher=frozen)
    if not cluster.is_central:
        return run, broadcast(Progress(), cluster)
    central, progress = _begin_or_restore(run, saved, named, quiet)
    text = Text(valid, cfg.data.seq_len, cfg.run.eval_tokens)
    what = (cut.template, cut.block_map, central, text, cfg.train.scale, cfg.train.precision)
    evaluator = Evaluator(*what, device=cut.device if cfg.run.central == "host" else None)
    run = replace(run, central=central, evaluator=evaluator)
    if saved is not None:
        (_finished if saved.round >= run.end(progress) else _go_on)(saved, cfg, quiet)
    return run, broadcast(progress, cluster)


def _check_engine(cfg: Config) -> None:
    """Refuse what the engine of this method and variant cannot do."""
    if cfg.train.method != "twist" and cfg.run.variant in ("true", "sharded"):
        raise ValueError(
            f"train.method = {cfg.train.method!r} trains one model on every rank: use run.variant "
            f"local, masked or hybrid"
        )
    if cfg.run.central == "host" and (cfg.train.method, cfg.run.variant) != ("twist", "local"):
        raise ValueError("run.central = 'host': only for run.variant = 'local' and twist rounds")


def _begin_or_restore(
    run: Run, saved: Checkpoint | None, teacher_name: str, quiet: bool
) -> tuple[Central, Progress]:
    """The central model and where its run stands: at the start, or as they were saved."""
    cfg, cut = run.cfg, run.cut
    if saved is not None:
        central = checkpoint.restore(saved, cut)
        progress = checkpoint.progress_of(saved, cut.block_map)
        teacher.check_same(progress.teacher, teacher_name, cfg)
        _check_text(progress.text, run.batches.file, cfg)
    else:
        how = {"carry": n_rows(cfg) > 1, "outer": cfg.train.nesterov() is not None}
        central = create(cut.segments, huggingface.state(cut.template), **how)
        progress = Progress()
    order = _order(run, central, progress.order, saved is None, quiet)
    if saved is None:
        described = {"config": config.to_dict(cfg), **describe_run()}
        whole_file(Path(cfg.run.out, "run.json"), json.dumps(described, indent=1) + "\n")
    central.in_place = is_in_place(cfg)
    if cfg.run.central == "host":
        central = on_host(central)
    if cut.device.type == "cpu":  # one copy of the weights, not two
        huggingface.bind_(cut.template, central.layout.views(central.weights))
    text = run.batches.file.sha256
    return central, replace(progress, order=order, teacher=teacher_name, text=text)


def _check_text(was: str, tokens: TokenFile, cfg: Config) -> None:
    """A run goes on with the text it began with: its ledger counts that text's sequences."""
    if was and tokens.sha256 and was != tokens.sha256:
        raise ValueError(
            f"cannot resume {cfg.run.out}: data.train = {cfg.data.train!r} holds other tokens than "
            f"when the run began; bring them back, or begin a new run with these"
        )


def _cut(cfg: Config, saved: Checkpoint | None, device: torch.device) -> CutModel:
    """The model and its blocks, held against the widths and ratios that the config asks for."""
    if saved is None:
        template = huggingface.load(cfg.model, cfg.run.seed)
    else:
        template = checkpoint.template(saved)
    # it loads where tickets' classes are registered; `heal` trains it as one block
    if getattr(template.config, "is_heterogeneous", False) and cfg.blocks.n_ffn > 1:
        raise ValueError(f"model.weights = {cfg.model.weights!r}: {huggingface.IS_TICKET}")
    dtype = dtype_of(cfg)
    template = template.double() if dtype == torch.float64 else template
    cut = cut_model(template, cfg.blocks, device, dtype)
    check_blocks(cut.template, cut.block_map, cfg)
    return cut


def check_blocks(model: huggingface.Model, block_map: BlockMap, cfg: Config) -> None:
    """Hold a config against a model's blocks and positions; its shapes are enough."""
    huggingface.check_positions(model, cfg.data.seq_len)
    if cfg.train.method != "dense":
        generator.check(block_map, cfg.blocks, cfg.train.n_workers, cfg.train.method)
    masks.check(block_map, cfg.blocks, cfg.train.method)
    if any(cfg.blocks.mask_depth):
        depth.check(model, ())
    for ratio in cfg.run.eval_ratios:
        try:
            widths_of_ratio(block_map, ratio)
        except ValueError as error:
            raise ValueError(f"run.eval_ratios: {error}") from None


def _open_data(cfg: Config, cluster: Cluster) -> tuple[TokenFile, TokenFile]:
    if not cluster.is_central:
        cluster.barrier()  # the central rank goes first: it makes the built-in corpus once for all
    near = Path(cfg.run.out)
    train = open_tokens(resolve(cfg.data.train, "train", near))
    valid = open_tokens(resolve(cfg.data.valid, "valid", near))
    if cluster.is_central:
        cluster.barrier()
    return train, valid


def _n_rounds(cfg: Config, batches: Batches, saved: Checkpoint | None) -> int:
    t = cfg.train
    in_round = t.n_workers * t.batch * t.interval  # sequences
    n_rounds = t.rounds or int(t.epochs * batches.n_sequences // in_round)
    if n_rounds < 1:
        raise ValueError(
            f"train.rounds = {t.rounds} and train.epochs = {t.epochs} make no round: one round is "
            f"{t.n_workers} workers x {t.interval} steps x {t.batch} sequences, the data has "
            f"{batches.n_sequences}"
        )
    if saved is not None and t.rounds and saved.round > t.rounds:
        raise ValueError(
            f"{saved.path} has done {saved.round} rounds already, more than train.rounds = "
            f"{n_rounds}"
        )
    return n_rounds


def _order(run: Run, central: Central, known: Order, begins: bool, quiet: bool) -> Order:
    """Every layer's blocks by mask-Fisher, on sequences from all over the training tokens.

    With `blocks.sort` a run that begins sorts the neurons of its FFN layers instead. One that goes
    on keeps the order it has; what that lacks is scored on the weights of now.
    """
    cfg, cut, block_map = run.cfg, run.cut, run.cut.block_map
    sorts, is_read = begins and cfg.blocks.sort, cfg.blocks.nested and cfg.train.method != "dense"
    if not (sorts or is_read):
        return known
    order, ids = dict(known), scored_sequences(run.batches.file, cfg.data.seq_len)
    with terminal.progress(quiet) as bar:
        task = bar.add_task("order of blocks", total=len(ids), note="")
        tick = partial(bar.advance, task)
        if sorts:
            order = sort_neurons_(cut.template, block_map, central, ids, tick)
        elif not {group.name for group in block_map.groups} <= order.keys():
            slopes = mask_slopes(cut.template, block_map, central, ids)
            order = order_of(mask_fisher(slopes, len(ids), tick))
        if is_read and any(cfg.blocks.mask_depth) and not masks.layer_order(block_map, order):
            bar.update(task, description="order of layers")
            order[LAYERS] = order_of_layers(cut.template, block_map, central, ids)
    return order if is_read else known


def scored_sequences(tokens: TokenFile, seq_len: int) -> Tensor:
    """The text that an order of blocks is scored on: windows from all over the tokens."""
    n = tokens.n_sequences(seq_len)
    return tokens.sequences(list(range(0, n, max(1, n // N_SCORED)))[:N_SCORED], seq_len)


def _find(cfg: Config, resumes: bool, cluster: Cluster) -> Checkpoint | None:
    """The newest valid checkpoint to go on from, refusing one of another run."""
    folder = Path(cfg.run.out, "checkpoints")
    if not resumes and any(folder.glob("round-*")):
        raise ValueError(
            f"run.out = {cfg.run.out!r} already holds a run: add --resume, or choose another folder"
        )
    if not (resumes and cluster.is_central and checkpoint.numbered(folder)):
        return None
    found = checkpoint.open_(cfg.run.out)
    for name, (was, now) in _changes(found, cfg).items():
        outer_appears = name == "train.outer" and "none" in (was, now)
        if name in REFUSED or name.split(".")[0] in REFUSED or outer_appears:
            raise ValueError(
                f"cannot resume {found.path}: {name} was {was!r} and is now {now!r}; to go on with "
                f"the run's own config: twistlm train {cfg.run.out} --resume"
            )
    return found


def _go_on(found: Checkpoint, cfg: Config, quiet: bool) -> None:
    """Say where a run goes on and what is not as it was, and write it to `resumes.jsonl`."""
    changed, here = _changes(found, cfg), describe_run()
    with (Path(cfg.run.out) / "resumes.jsonl").open("a") as file:
        file.write(json.dumps({"round": found.round, "changed": changed, **here}) + "\n")
    if quiet:
        return
    for name, (was, now) in changed.items():
        console.print(f"{name} was {was!r} and is now {now!r}", style="yellow")
    console.print(f"resuming from {found.path}")
    if (was := found.manifest["device"]) != (now := here["device"]):
        console.print(
            f"the device was {was!r} and is now {now!r} (run.device, run.threads): the run goes "
            f"on, but not bit for bit as it would have there",
            style="yellow",
        )


def _finished(found: Checkpoint, cfg: Config, quiet: bool) -> None:
    """Say that nothing is left to train; a changed key that can have no effect is refused."""
    key = "train.rounds" if cfg.train.rounds else "train.epochs"
    more = f"to train more, say {key}=N with N > {getattr(cfg.train, key[6:])}"
    sentence = f"{cfg.run.out} is finished after round {found.round}"
    if changed := _changes(found, cfg):
        name, (_, now) = next(iter(changed.items()))
        raise ValueError(f"{sentence}: {name} = {now!r} would change nothing; {more}")
    if not quiet:
        console.print(f"{sentence}: nothing was trained; {more}")


def _changes(found: Checkpoint, cfg: Config) -> dict[str, tuple[Any, Any]]:
    """`section.key` -> (was, is now) of every knob that makes a difference to what is trained."""
    old, new = config.to_dict(found.config), config.to_dict(cfg)
    knobs = [(s, key) for s in ("model", "data", "blocks", "train") for key in new[s]]
    pairs = {f"{s}.{k}": (old[s][k], new[s][k]) for s, k in [*knobs, ("run", "seed")]}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

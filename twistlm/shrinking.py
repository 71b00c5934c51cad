"""`twistlm shrink`: from a model and text to tickets of the sizes asked for, in one command.

OUT/shrink.json   what was asked, and the widths of every size
OUT/text          tokens to train and to measure on, and a teacher's predictions where cached
OUT/train.toml    everything that was chosen, for `twistlm train`
OUT/parent        the training run
OUT/params-350M   a ticket of each size, and with --gguf its file for llama.cpp
OUT/tasks.json    with --tasks: every task's numbers and standard errors, for all models

Every stage leaves its result whole or not at all, so the same command goes on where it stopped.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from rich.table import Table
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from . import config, recipe
from .compute import speed
from .config import Config, ModelConfig
from .data import mixture
from .data.prepare import STRINGS, n_bytes
from .data.teacher_cache import id_bytes
from .data.token_file import open_tokens
from .export import check_type, gguf
from .export.architectures import architecture_of
from .model import families, huggingface
from .model.blocks import Widths
from .model.tokenizer import covers, load_tokenizer, vocabulary_of
from .recipe import Size
from .system import manifest, terminal
from .system.device import pick_device
from .system.files import alone, whole_file
from .system.terminal import console, waiting
from .tickets import deploy
from .tickets.extract import make_ticket
from .tickets.parent import open_parent
from .tickets.requests import ShrinkRequest, TicketRequest, amount
from .tickets.runnable import Runnable, open_runnable
from .tickets.score import score_model
from .tickets.stock import stock_config
from .tickets.tasks import TaskScores, open_tasks, score_tasks
from .tickets.tasks import record as task_record
from .tickets.text import text_of
from .training import checkpoint, plan, rounds
from .training.startup import check_blocks
from .training.teacher import write_cache

RECORD, CONFIG = "shrink.json", "train.toml"
MEASURED = 32768  # tokens that every size is measured on
BYTES_PER_TOKEN = 4  # of text that is not read yet
TAUGHT = 4 / 3  # of a forward and backward pass: with a teacher's forward pass beside it
SPARE = 0.9  # of --hours: text, tickets and measurements have the rest


@dataclass(frozen=True)
class Row:
    """A model as it was measured: the one that was given, the trained parent, or a ticket."""

    name: str
    folder: Path
    n_params: int
    perplexity: float
    n_bytes: int
    decode_ms: float
    tasks: dict[str, float] = field(default_factory=dict)  # with --tasks: means over them


def run(request: ShrinkRequest) -> list[Row]:
    """All stages, or those that an earlier call has left."""
    out, record = request.out, {"asked": _asked(request)}
    changed: set[str] = set()
    if (out / RECORD).is_file():
        before = json.loads((out / RECORD).read_text())
        for key, was in before["asked"].items():
            if was != (now := record["asked"].get(key)):
                if "sizes" in before:
                    raise ValueError(
                        f"--out {out} was made with {key} = {was!r}, not {now!r}: choose another "
                        f"folder; `twistlm extract {out}/parent --stock` cuts other sizes"
                    )
                changed.add(key)  # and nothing was trained: a request may be corrected
        record = record if changed else before
    elif out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty and was not made by shrink: choose another")
    if not request.budgets:
        raise ValueError("give --to, --size, --latency or --memory, several for several sizes")
    if request.gguf:
        check_type("gguf", request.gguf, "--gguf")
    tasks = open_tasks(request.tasks) if request.tasks else None
    inputs = None if "sizes" in record else check(request)
    if inputs is None and request.gguf:  # which may be another type than before
        words = load_tokenizer(f"{out}/text/train.tokenizer.json")
        check_gguf(huggingface.outline(weights_of(request)), words, request.model)
    with alone(out):
        if inputs is None:
            console.print(f"text: as an earlier call has read it, in {out / 'text'}")
        else:
            if changed & {"model", "text", "tokenizer", "column"}:
                shutil.rmtree(out / "text", ignore_errors=True)
            whole_file(out / RECORD, manifest.written(record))
            record["sizes"] = prepare(request, inputs)
            whole_file(out / RECORD, manifest.written(record))
        cfg = config.load(str(out / CONFIG))
        _train(cfg)
        rows = _cut(request, cfg, record["sizes"])
    if tasks is None:
        return rows
    scores = list(score_tasks(_runnable(request, cfg, rows), tasks))
    whole_file(out / "tasks.json", manifest.written(task_record(scores)))
    return [replace(row, tasks=_means(each)) for row, each in zip(rows, scores, strict=True)]


def _runnable(
    request: ShrinkRequest, cfg: Config, rows: Sequence[Row]
) -> Iterator[tuple[str, Runnable]]:
    """All models by the names of their folders; the given one may have its tokenizer elsewhere."""
    given = open_runnable(weights_of(request), cfg.run.device)
    yield Path(request.model).name, replace(given, source=f"{cfg.data.train}.tokenizer.json")
    for row in rows[1:]:
        yield row.folder.name, open_runnable(row.folder, cfg.run.device)


def _means(scores: TaskScores) -> dict[str, float]:
    """Means over several tasks, or all numbers of one."""
    found = ((task, *each) for task, named in scores.tasks.items() for each in named.items())
    return scores.means or {f"{task} {metric}": number.value for task, metric, number in found}


def _asked(request: ShrinkRequest) -> dict[str, Any]:
    """What decides over training and tickets, as JSON."""
    named = tuple(text if isinstance(text, str) else STRINGS for text in request.text)
    told = asdict(replace(request, text=named))
    return json.loads(json.dumps({k: told[k] for k in told if k not in ("out", "gguf", "tasks")}))


@dataclass(frozen=True)
class Inputs:
    """What a request names, opened and found to be usable."""

    texts: list[mixture.Weighted]
    tokenizer: Tokenizer
    model: PreTrainedModel  # without storage
    sizes: list[Size]
    config_for: Callable[..., Config]  # of n_text and n_tokens


def check(request: ShrinkRequest) -> Inputs:
    """Refuse in one sentence what cannot work, before anything long starts."""
    texts, overrides = mixture.parse(request.text), request.overrides
    if request.tokens is not None and request.hours is not None:
        raise ValueError("give --tokens or --hours, not both")
    n_tokens = 0 if request.tokens is None else int(amount("tokens", request.tokens))
    if request.tokens is not None and n_tokens < 1:
        raise ValueError(f"--tokens {request.tokens}: must be at least 1")
    weights = weights_of(request)
    model = huggingface.outline(weights)
    tokenizer = _tokenizer(request, weights, huggingface.vocab_size(model))
    if request.gguf:
        check_gguf(model, tokenizer, request.tokenizer or weights)
    cut = recipe.cut_for(model, overrides)
    device = config.override(Config(ModelConfig(weights)), overrides).run.device
    sizes = _sizes(request, model, cut, device)
    own: dict[str, Any] = {"out": str(request.out), "overrides": overrides}
    own |= {"room": _room(device)[0], "device": pick_device(device).type}
    config_for = partial(recipe.config_for, model, weights, cut, sizes, **own)
    inputs = Inputs(texts, tokenizer, model, sizes, config_for)
    n_text = sum(n_bytes(each.source) or 0 for each in texts) // BYTES_PER_TOKEN  # about
    cfg = config_for(n_text=n_text, n_tokens=n_tokens)
    check_blocks(model, families.partition(model, cfg.blocks), cfg)
    needs(request, inputs, cfg, n_text)
    return inputs


def _tokenizer(request: ShrinkRequest, weights: str, n_known: int) -> Tokenizer:
    """The tokenizer asked for, or the model's own; it must be made for the model's tokens."""
    tokenizer = load_tokenizer(request.tokenizer or weights)
    its = vocabulary_of(weights) if request.tokenizer else None
    if max(tokenizer.get_vocab().values()) >= n_known or (its and not covers(its, tokenizer)):
        what = f"it is not that of {request.model}, which knows {n_known} tokens"
        raise ValueError(f"--tokenizer {request.tokenizer or weights}: {what}")
    return tokenizer


def _sizes(
    request: ShrinkRequest, model: PreTrainedModel, cut: recipe.Cut, device: str
) -> list[Size]:
    """The widths that the request's budgets buy, or the usual ones where it has none."""

    def decode_ms(widths: Widths) -> float:
        shapes = cut.block_map.narrowed(huggingface.shapes(model), widths)
        narrow: Any = stock_config(model, shapes)
        ready = speed.blank(huggingface.on_meta(narrow), device, getattr(torch, request.dtype))
        return speed.measure_all([ready])[0].decode_ms

    if not (budgets := request.budgets):
        return recipe.usual_sizes(model, cut)
    return recipe.sizes_for(model, cut, budgets, request.dtype, decode_ms)


def weights_of(request: ShrinkRequest) -> str:
    """The model by the name that others know it by: gguf:FILE, a checkpoint of a run."""
    name = request.model
    is_file = name.endswith(".gguf") and ":" not in name
    return checkpoint.weights_of(f"gguf:{name}" if is_file else name)


def check_gguf(model: PreTrainedModel, tokenizer: Tokenizer, name: str) -> None:
    """Refuse a model, or a tokenizer of this `name`, that llama.cpp cannot have."""
    architecture_of(model)
    gguf.split_of(json.loads(tokenizer.to_str()), name)


def needs(request: ShrinkRequest, inputs: Inputs, cfg: Config, n_text: int) -> str:
    """Memory and disk that a training takes, in words; an error where there is less."""
    memory = plan.memory(cfg, inputs.model, pick_device(cfg.run.device).type)[1]
    room, whose = _room(cfg.run.device)
    if memory > room:
        raise ValueError(
            f"training {request.model} takes about {decimal(memory)} of memory, and {whose} has "
            f"{decimal(room)}: lower data.seq_len = {cfg.data.seq_len}, or take a smaller model"
        )
    width = id_bytes(huggingface.vocab_size(inputs.model))
    cached = plan.TOP * (width + 2) if cfg.train.teacher == "cache" else 0
    disk = n_text * (2 * width + cached)  # tokens: each source, then all
    disk += 3 * 12 * inputs.model.num_parameters()  # checkpoints: two, and one being written
    disk += (4 + 2 * bool(request.gguf)) * sum(size.n_params for size in inputs.sizes)
    near = next(path for path in (request.out, *request.out.absolute().parents) if path.exists())
    if disk > (free := shutil.disk_usage(near).free):
        said = f"--out {request.out} takes about {decimal(disk)} of disk"
        raise ValueError(f"{said}, and {decimal(free)} are free: choose another folder")
    return f"{decimal(memory)} of memory, {decimal(disk)} of disk in {request.out}"


def _room(device: str) -> tuple[int, str]:
    """Bytes of memory for a training, and whose."""
    where = pick_device(device)
    if where.type == "cuda":
        return torch.cuda.mem_get_info(where)[0], "the GPU"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"


def prepare(request: ShrinkRequest, inputs: Inputs | None = None) -> dict[str, str]:
    """Make the tokens, choose the config, say what it takes: the name of each size -> its ratio."""
    inputs = inputs or check(request)
    folder = request.out / "text"
    train, valid = mixture.mix(inputs.texts, folder, inputs.tokenizer, request.column)
    n_text, n_valid = train.meta.n_tokens, valid.meta.n_tokens
    n_tokens = n_text if request.tokens is None else int(amount("tokens", request.tokens))
    cfg = inputs.config_for(n_text=n_text, n_tokens=n_tokens)
    seq_len, t = cfg.data.seq_len, cfg.train
    least = t.n_workers * t.interval * seq_len  # a batch may hold a sequence more than once
    if n_text < least or n_valid < seq_len:
        shutil.rmtree(folder)
        (request.out / RECORD).unlink(missing_ok=True)
        raise ValueError(
            f"--text: {n_text:,} tokens to train and {n_valid:,} to measure on are too few: "
            f"training takes at least {least:,}, a sequence of data.seq_len = {seq_len} for every "
            f"step of a round, and a measurement {seq_len:,}"
        )
    seconds = TAUGHT * speed.training_seconds(inputs.model, seq_len, cfg.run.device)
    if request.hours:
        n_tokens = int(SPARE * 3600 * request.hours / seconds)
        cfg = inputs.config_for(n_text=n_text, n_tokens=n_tokens)
    takes, t = needs(request, inputs, cfg, n_text), cfg.train
    n_tokens = t.rounds * t.interval * t.n_workers * t.batch * seq_len
    for size in inputs.sizes:
        console.print(f"{size.budget.slug}: {size.n_params:,} parameters, {size.ratio}")
    about = timedelta(seconds=round(n_tokens * seconds))
    console.print(f"{n_tokens:,} tokens in {t.rounds:,} rounds: about {about}, {takes}")
    header = f"Chosen by `twistlm shrink {request.model}`; what it trains:\n"
    header += f"  twistlm train {request.out / CONFIG} --auto-resume"
    whole_file(request.out / CONFIG, recipe.written(cfg, header))
    return {size.budget.slug: size.ratio for size in inputs.sizes}


def _train(cfg: Config) -> None:
    """The teacher's predictions where they are read more than once, then all rounds."""
    t = cfg.train
    if t.teacher == "cache" and not Path(f"{cfg.data.train}.teacher.json").is_file():
        file = open_tokens(cfg.data.train)
        top = min(plan.TOP, file.meta.vocab_size)
        write_cache(file, cfg.model.weights, top, cfg.data.seq_len, cfg.run.device)
    last = Path(cfg.run.out) / "checkpoints" / checkpoint.folder_name(t.rounds)
    rounds.train(cfg, resume=True, quiet=last.is_dir())


def _cut(request: ShrinkRequest, cfg: Config, sizes: dict[str, str]) -> list[Row]:
    """A ticket of each size, its GGUF file where that is asked for, and what all are worth."""
    parent = open_parent(cfg.run.out, cfg.run.device)
    rows: list[Row] = []
    for name, ratio in sizes.items():
        folder, file = request.out / name, request.out / f"{name}.gguf"
        if not (folder / deploy.TICKET).is_file():
            asked = TicketRequest(ratio=(ratio,), stock=True, tokens=MEASURED, dtype=request.dtype)
            make_ticket(parent, asked).save(folder)
        proof = deploy.read_ticket(folder)
        found = proof["perplexity"]
        if not rows:
            rows.append(_row("trained", Path(cfg.run.out), proof["parent"], found["parent"]))
        rows.append(_row(name, folder, proof, found["ticket"]))
        if request.gguf and gguf.type_of(file) != request.gguf:
            with waiting.status(f"write {file}"):
                model = deploy.load_ticket(folder).float()
                gguf.export(model, file, request.gguf, folder / "tokenizer.json")
    start = huggingface.load(checkpoint.resolved(cfg).model, cfg.run.seed)
    huggingface.rounded_(start, getattr(torch, request.dtype))  # as the others were measured
    torch.nn.Module.to(start, parent.central.weights.device)
    score = score_model(start, text_of(parent, None, MEASURED), request.model, cfg.train.precision)
    given = replace(rows[0], name=request.model, folder=Path(request.model), perplexity=score.full)
    return [given, *rows]


def _row(name: str, folder: Path, proof: dict[str, Any], perplexity: float) -> Row:
    n_bytes, decode_ms = proof["bytes"], proof["speed"]["decode_ms"]
    return Row(name, folder, proof["n_params"], perplexity, n_bytes, decode_ms)


def table(rows: Sequence[Row]) -> Table:
    """Whole models and tickets: parameters, perplexity on held-out text, tasks, bytes, speed."""
    heads = ("", "parameters", "of whole", "perplexity", *rows[0].tasks, "MB", "ms per token")
    made = terminal.table("perplexity on text that was held out", *heads)
    for row in rows:
        share = f"{row.n_params / rows[0].n_params:.1%}"
        numbers = f"{row.perplexity:.2f}", *(f"{mean:.4f}" for mean in row.tasks.values())
        size = f"{row.n_bytes / 1e6:,.1f}", f"{row.decode_ms:.2f}"
        made.add_row(row.name, f"{row.n_params:,}", share, *numbers, *size)
    return made

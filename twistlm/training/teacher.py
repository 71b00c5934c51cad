"""The frozen teacher of a run, or the cache of its predictions."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from torch import Tensor, nn

from ..compute import graphs
from ..compute.attention import causal_
from ..compute.loss import AnyTeacher, CachedTeacher, Teacher
from ..config import Config
from ..data import teacher_cache
from ..data.teacher_cache import TeacherCache, TeacherCacheMeta
from ..data.token_file import TokenFile
from ..model import huggingface
from ..model.huggingface import Model
from ..model.layout import CutModel
from ..model.tokenizer import covers, load_tokenizer, vocabulary_of
from ..system.device import is_bf16, pick_device
from ..system.terminal import progress
from . import checkpoint

# logits made at a time for a cache: 64 MB, 1 GB in float32
AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 28}


def load(
    cfg: Config, cut: CutModel, tokens: TokenFile, resumes: bool
) -> tuple[AnyTeacher | None, str, TeacherCache | None]:
    """What `train.teacher` names, ready on the run's device, a name of its weights, its cache.

    A run that begins has just read its start, which may take long: it is not read again.
    """
    t = cfg.train
    if t.teacher == "none" or t.distil == 0:
        return None, "", None
    mine = huggingface.vocab_size(cut.template)
    if t.teacher == "cache":
        found = teacher_cache.open_teacher_cache(tokens, cfg.data.seq_len, mine)
        named = f"{found.meta.weights_sha256} top {found.meta.top}"
        return CachedTeacher(mine, t.distil), named, found
    is_start = t.teacher == "start"
    if is_start and not resumes and cut.dtype == torch.float32:
        model = copy.deepcopy(cut.template)
    elif is_start:
        model = huggingface.load(cfg.model, cfg.run.seed)
    else:
        model = huggingface.pretrained(t.teacher, "train.teacher")
    if mine != (its := huggingface.vocab_size(model)):
        raise ValueError(
            f"train.teacher = {t.teacher!r} knows {its} tokens, the model {mine}: a teacher needs "
            f"the same tokenizer"
        )
    huggingface.check_positions(model, cfg.data.seq_len, f"train.teacher = {t.teacher!r}")
    source = cfg.model.weights if is_start else t.teacher
    _check_tokenizer(f"train.teacher = {t.teacher!r}", source, tokens)
    # before it is rounded for this device: a run may move to another
    named = huggingface.weights_sha256(model)
    return _teacher(model, cfg, cut), named, None


def check_same(was: str, now: str, cfg: Config) -> None:
    """A run goes on with the teacher it began with; old checkpoints do not name theirs."""
    if was and was != now:
        what = "model.weights" if cfg.train.teacher == "start" else "train.teacher"
        what = "the cache beside data.train" if cfg.train.teacher == "cache" else what
        raise ValueError(
            f"cannot resume {cfg.run.out}: its teacher has other weights than when the run began "
            f"(train.teacher = {cfg.train.teacher!r}); bring back what {what} was, or begin a new "
            f"run with this one"
        )


def _check_tokenizer(what: str, source: str, tokens: TokenFile) -> None:
    """A teacher that brings a tokenizer must give the ids of the tokens the same meaning."""
    try:
        its, wanted = vocabulary_of(source), tokens.tokenizer_path
    except ValueError as error:  # a file that is no tokenizer
        raise ValueError(f"{what}: {error}") from None
    if its and wanted.is_file() and not covers(its, load_tokenizer(str(wanted))):
        more = "and a teacher needs the same one"
        raise ValueError(f"{what}: its tokenizer is not that of {tokens.stem}, {more}")


def write_cache(
    tokens: TokenFile, name: str, top: int, seq_len: int, device: str = "auto", quiet: bool = False
) -> TeacherCache:
    """Store the `top` likeliest tokens of a model, with log-probs, beside a token file."""
    name = checkpoint.weights_of(name)
    model = huggingface.pretrained(name, "--teacher")
    vocab = huggingface.vocab_size(model)
    most, longest = min(vocab, teacher_cache.MOST), huggingface.n_positions(model)
    if not 1 <= top <= most:
        raise ValueError(f"--top {top}: must lie in 1..{most}")
    if not 2 <= seq_len <= longest:
        raise ValueError(f"--seq-len {seq_len}: must lie in 2..{longest}, as {name} reads it")
    tokens.check(seq_len, vocab)
    _check_tokenizer(f"--teacher {name}", name, tokens)
    meta = TeacherCacheMeta(
        teacher=name,
        weights_sha256=huggingface.weights_sha256(model),
        top=top,
        seq_len=seq_len,
        vocab_size=vocab,
        n_sequences=tokens.n_sequences(seq_len),
        tokens_sha256=teacher_cache.tokens_sha256(tokens),
        tokenizer_sha256=tokens.meta.tokenizer_sha256,
    )
    where = pick_device(device)
    dtype = torch.bfloat16 if is_bf16("auto", where) else torch.float32
    frozen = _frozen(model, where, dtype)
    return teacher_cache.write_teacher_cache(
        tokens, meta, lambda first: _predictions(frozen, tokens, meta, first, quiet)
    )


@torch.no_grad()
def _predictions(
    model: Model, tokens: TokenFile, meta: TeacherCacheMeta, first: int, quiet: bool
) -> Iterator[Tensor]:
    """What the model predicts for all windows from `first` on, packed for the cache."""
    batch = max(1, AT_ONCE[model.device.type] // (meta.vocab_size * meta.seq_len))
    with progress(quiet) as bar:
        task = bar.add_task("teacher's cache, sequences", total=meta.n_sequences, note="")
        bar.update(task, completed=first)
        for start in range(first, meta.n_sequences, batch):
            rows = list(range(start, min(start + batch, meta.n_sequences)))
            ids = tokens.sequences(rows, meta.seq_len).to(model.device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            highest, likeliest = logits.topk(meta.top)
            log_probs = highest - logits.logsumexp(-1, keepdim=True)
            yield teacher_cache.pack(likeliest, log_probs, meta.vocab_size).cpu()
            bar.update(task, advance=len(rows))


# a model's Hugging Face config, and its weights as safetensors
Packed = tuple[dict[str, Any], bytes]


def pack(teacher: AnyTeacher | None) -> Packed | None:
    """A teacher on its way to other processes; what a cache holds goes with the tokens."""
    if not isinstance(teacher, Teacher):
        return None
    weights = {name: param.detach().cpu() for name, param in teacher.model.named_parameters()}
    return teacher.model.config.to_dict(), save(weights)


def unpack(packed: Packed | None, cfg: Config, cut: CutModel) -> AnyTeacher | None:
    """The teacher that was packed, ready on this process's device."""
    if packed is None:
        t, vocab = cfg.train, huggingface.vocab_size(cut.template)
        return CachedTeacher(vocab, t.distil) if t.teacher == "cache" and t.distil else None
    model, weights = huggingface.from_table(packed[0], cut.dtype), load_tensors(packed[1])
    for name, param in model.named_parameters():
        param.data.copy_(weights[name])
    return _teacher(model, cfg, cut)


def _teacher(model: Model, cfg: Config, cut: CutModel) -> Teacher:
    """In the precision of the local steps, compiled as they are."""
    dtype = torch.bfloat16 if is_bf16(cfg.train.precision, cut.device) else cut.dtype
    _frozen(model, cut.device, dtype)
    if graphs.is_on(cfg.train.compile, cut.device):
        graphs.compile_layers_(model)
    return Teacher(model, cfg.train.distil)


def _frozen(model: Model, device: torch.device, dtype: torch.dtype) -> Model:
    model.eval().requires_grad_(False)
    nn.Module.to(huggingface.rounded_(model, dtype), device)
    causal_(model)
    return model

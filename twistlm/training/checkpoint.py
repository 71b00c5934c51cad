"""Checkpoints: safetensors + JSON in one folder, written atomically, verified by sha256.

round-000120/
  model.safetensors    weights by Hugging Face name (with config.json: a plain HF folder)
  moments.safetensors  Adam's m/ and v/, when they are carried
  outer.safetensors    the outer optimizer's momentum, when there is one
  config.json          Hugging Face's
  tokenizer.json
  checkpoint.json      round, twistlm config, git hash, versions, sha256 of every file above
"""

from __future__ import annotations

import copy
import shutil
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .. import config
from ..config import Config
from ..data import stream
from ..data.stream import Leases
from ..model import huggingface
from ..model.blocks import BlockMap, State
from ..model.central import Central, create
from ..system import manifest
from ..system.files import DRAFT, file_sha256, save_tensors, whole_folder
from ..system.provenance import describe_run
from ..system.terminal import console
from .run import Progress, beginning

MANIFEST = "checkpoint.json"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    path: Path
    manifest: dict[str, Any]

    @property
    def config(self) -> Config:
        return config.from_record(self.manifest["config"])

    @property
    def round(self) -> int:
        return self.manifest["round"]

    @property
    def leases(self) -> Leases:
        """What of the data has been trained; old checkpoints: by all workers, in all rounds."""
        if "leases" in self.manifest:
            return stream.from_dict(self.manifest["leases"])
        t = self.config.train
        return Leases(self.round * t.interval * t.n_workers * t.batch)

    @property
    def tokenizer_sha256(self) -> str | None:
        return self.manifest["tokenizer_sha256"]


def save(
    folder: Path,
    central: Central,
    progress: Progress,
    cfg: Config,
    model: PreTrainedModel,
    tokenizer: Path | None,
    keep: int,
) -> Path:
    """Write `folder/round-NNNNNN`; it appears whole or not at all, then older ones are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / folder_name(progress.round)
    # of a process that was killed; a run's folder has one writer
    for dead in folder.glob(f"{DRAFT}*"):
        shutil.rmtree(dead, ignore_errors=True)
    with whole_folder(target) as draft:
        views = [central.layout.views(row) for row in central.buffer]
        save_tensors(views[0], draft / "model.safetensors")
        if len(views) > 1:
            moments = {f"m/{name}": t for name, t in views[1].items()}
            moments |= {f"v/{name}": t for name, t in views[2].items()}
            save_tensors(moments, draft / "moments.safetensors")
        if central.velocity is not None:
            save_tensors(central.layout.views(central.velocity), draft / "outer.safetensors")
        hf_config = copy.deepcopy(model.config)
        hf_config.architectures = [type(model).__name__]
        hf_config.dtype = central.buffer.dtype
        hf_config.save_pretrained(draft)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, draft / "tokenizer.json")
        record = {
            "format": FORMAT,
            "round": progress.round,
            "config": config.to_dict(cfg),
            "tokenizer_sha256": file_sha256(tokenizer) if tokenizer else None,
            "leases": stream.to_dict(progress.leases),
            "held": {name: list(counts) for name, counts in progress.held.items()},
            "rho": dict(progress.rho),
            "order": {name: list(blocks) for name, blocks in progress.order.items()},
            "teacher": progress.teacher,
            **describe_run(),
            "files": {p.name: file_sha256(p) for p in sorted(draft.iterdir())},
        }
        (draft / MANIFEST).write_text(manifest.written(manifest.sealed(record)))
    until_now = [path for path in numbered(folder) if _round(path) <= progress.round]
    for old in until_now[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def folder_name(round: int) -> str:
    return f"round-{round:06d}"


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, and a sentence for each newer one that does not."""
    broken: list[str] = []
    for path in reversed(numbered(folder)):
        try:
            return verify(path), broken
        except ValueError as error:
            broken.append(str(error))
    return None, broken


def open_(path: str | Path) -> Checkpoint:
    """A checkpoint folder, or the newest valid one of a run folder."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        return verify(path)
    found, broken = newest(path / "checkpoints")
    if found is None:
        why = f": {broken[0]}" if broken else f" (no {MANIFEST}, no checkpoints folder)"
        raise ValueError(f"{path} holds no valid checkpoint{why}")
    for sentence in broken:
        console.print(f"skipped: {sentence}", style="yellow", markup=False, soft_wrap=True)
    return found


def weights_of(name: str) -> str:
    """A name of weights; a run folder stands for its newest valid checkpoint."""
    is_run = (Path(name) / "checkpoints").is_dir() or is_numbered(Path(name))
    return str(open_(name).path) if is_run else name


def resolved(cfg: Config) -> Config:
    """The config with checkpoints where it starts from, or is taught by, a run folder."""
    return replace(
        cfg,
        model=replace(cfg.model, weights=weights_of(cfg.model.weights)),
        train=replace(cfg.train, teacher=weights_of(cfg.train.teacher)),
    )


def verify(path: Path) -> Checkpoint:
    """Read the manifest and compare every file's sha256: a flipped byte is refused."""
    try:
        record = manifest.read_json(path / MANIFEST)
        files, version = dict(record["files"]), record["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no checkpoint: {MANIFEST} cannot be read ({error!r})"
        ) from None
    if version != FORMAT:
        raise ValueError(f"{path} has checkpoint format {version}; this twistlm reads {FORMAT}")
    manifest.check_seal(path / MANIFEST, record)
    for name, sha256 in files.items():
        file = path / Path(name).name
        if not file.is_file():
            raise ValueError(f"checkpoint {path} is damaged: {name} is missing")
        try:
            manifest.check_hash(file, sha256)
        except ValueError:
            raise ValueError(
                f"checkpoint {path} is damaged: {name} does not match its sha256"
            ) from None
    return Checkpoint(path, record)


def template(checkpoint: Checkpoint) -> PreTrainedModel:
    """The checkpoint's model, with its weights."""
    held = huggingface.header(checkpoint.path / "model.safetensors")
    try:
        hf_config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
        huggingface.drop_code_(hf_config)
    except Exception as error:  # a damaged one fails in many ways
        raise ValueError(
            f"{checkpoint.path}: config.json cannot be read: {huggingface.one_line(error)}"
        ) from None
    what = f"{checkpoint.path} holds {len(held)} tensors"
    want = huggingface.shapes(huggingface.check_size(hf_config, sys.maxsize, len(held), what))
    if missing := set(want) ^ set(held):
        raise ValueError(
            f"{checkpoint.path}: weights and config.json disagree about {sorted(missing)[0]}"
        )
    for name, shape in want.items():
        if held[name] != shape:
            raise ValueError(f"{checkpoint.path}: {name} has shape {held[name]}")
    weights = _load(checkpoint, "model.safetensors")
    model = AutoModelForCausalLM.from_config(
        hf_config, dtype=torch.float32, trust_remote_code=False
    )
    dtype = next(iter(weights.values())).dtype
    model.to(dtype)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[name])
    return model.eval()


def restore(
    checkpoint: Checkpoint, model: PreTrainedModel, block_map: BlockMap, device: torch.device
) -> Central:
    """The central model as it was saved; `model` is the checkpoint's `template`."""
    files, weights = checkpoint.manifest["files"], _load(checkpoint, "model.safetensors")
    carry, outer = "moments.safetensors" in files, "outer.safetensors" in files
    shapes = huggingface.shapes(model)
    central = create(weights, shapes, block_map, carry=carry, outer=outer, device=device)
    if carry:
        moments = _load(checkpoint, "moments.safetensors")
        for row, prefix in ((1, "m/"), (2, "v/")):
            for name, view in central.layout.views(central.buffer[row]).items():
                view.copy_(moments[prefix + name])
    if central.velocity is not None:
        saved = _load(checkpoint, "outer.safetensors")
        for name, view in central.layout.views(central.velocity).items():
            view.copy_(saved[name])
    return central


def progress_of(checkpoint: Checkpoint, block_map: BlockMap) -> Progress:
    """Where the run stood; blocks of another number than then are counted anew."""
    held = dict(beginning(block_map).held)
    for name, counts in checkpoint.manifest["held"].items():
        if len(counts) == len(held.get(name, ())):
            held[name] = tuple(counts)
    rho = dict(checkpoint.manifest["rho"])
    order = {n: tuple(blocks) for n, blocks in checkpoint.manifest.get("order", {}).items()}
    if any(sorted(order.get(g.name, ())) != list(range(g.n_blocks)) for g in block_map.groups):
        order = {}  # none, or one of blocks that are cut otherwise now
    teacher = str(checkpoint.manifest.get("teacher", ""))
    return Progress(checkpoint.round, checkpoint.leases, held, rho, order, teacher)


def _load(checkpoint: Checkpoint, name: str) -> State:
    try:
        return load_file(checkpoint.path / name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"checkpoint {checkpoint.path} is damaged: {name}: {error}") from None


def numbered(folder: Path) -> list[Path]:
    return sorted(filter(is_numbered, folder.glob("round-*")), key=_round)


def is_numbered(path: Path) -> bool:
    """A folder that is a checkpoint by its name, whatever has become of its files."""
    return path.is_dir() and path.name.startswith("round-") and path.name[6:].isdigit()


def _round(path: Path) -> int:
    return int(path.name[6:])


class Writer:
    """Saves the central model in a thread of its own; at most one checkpoint is in flight.

    A disk that takes no more is said at once, with path and bytes, and is no reason to stop:
    `failure` asks for another try after the next round. Only at the end it is an error.
    """

    def __init__(
        self,
        folder: Path,
        cfg: Config,
        model: PreTrainedModel,
        tokenizer: Path | None,
        central: Central | None,  # None on ranks that save nothing
    ):
        self.folder, self.cfg, self.model, self.tokenizer = folder, cfg, model, tokenizer
        self.last: Path | None = None  # the newest checkpoint that is whole on disk
        self.failure: str | None = None  # why the one before could not be written
        # host memory, used again for every checkpoint; the first touch of its pages is the slow one
        self._copy = None if central is None else _copied(central, None)
        self._thread: threading.Thread | None = None
        self._bug: BaseException | None = None

    def save(self, central: Central, progress: Progress) -> None:
        """Copy the central model and write it from there; it may change as soon as this returns."""
        self.wait()
        self.failure = None
        self._copy = _copied(central, self._copy)
        self._thread = threading.Thread(
            target=self._write, args=(self._copy, progress), name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._bug is not None:
            bug, self._bug = self._bug, None
            raise bug

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.wait()
        if self.failure and kind is None:
            raise OSError(self.failure)

    def _write(self, central: Central, progress: Progress) -> None:
        try:
            where = (self.cfg, self.model, self.tokenizer, self.cfg.run.keep)
            self.last = save(self.folder, central, progress, *where)
        except OSError as error:
            self.failure = self._sentence(central, progress.round, error)
            console.print(self.failure, style="yellow")
        except BaseException as bug:  # not ours to hide: it is raised where the run can see it
            self._bug = bug

    def _sentence(self, central: Central, done: int, error: OSError) -> str:
        kept = [central.buffer] if central.velocity is None else [central.buffer, central.velocity]
        n_bytes = sum(tensor.nbytes for tensor in kept)
        try:
            free = f"{shutil.disk_usage(self.folder).free:,}"
        except OSError:
            free = "unknown"
        return (
            f"checkpoint {self.folder / folder_name(done)} ({n_bytes:,} bytes, {free} "
            f"free) could not be written: {error}; older checkpoints are unharmed"
        )


def _copied(central: Central, old: Central | None) -> Central:
    """A copy in host memory; the tensors of an earlier copy are filled anew."""
    buffer = _host(central.buffer, old.buffer if old else None)
    velocity = None
    if central.velocity is not None:
        velocity = _host(central.velocity, old.velocity if old else None)
    if central.buffer.is_cuda:
        torch.cuda.current_stream(central.buffer.device).synchronize()
    return replace(central, buffer=buffer, velocity=velocity, sums=None)


def _host(tensor: Tensor, old: Tensor | None) -> Tensor:
    if old is None:
        old = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return old.copy_(tensor, non_blocking=True)

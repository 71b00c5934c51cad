"""Checkpoints: safetensors + JSON in one folder, written atomically, verified by sha256.

round-000120/
  model.safetensors    weights by Hugging Face name (with config.json: a plain HF folder)
  moments.safetensors  Adam's m/ and v/, when they are carried
  outer.safetensors    the outer optimizer's momentum, when there is one
  *-0000i-of-0000n.safetensors, model.safetensors.index.json: the same from n owners, as HF has it
  config.json          Hugging Face's
  tokenizer.json
  checkpoint.json      round, twistlm config, git hash, versions, sha256 of every file above
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from .. import config
from ..config import Config
from ..data import stream
from ..data.stream import Leases
from ..model import huggingface
from ..model.blocks import BlockMap, State
from ..model.central import Central, create
from ..model.huggingface import Model
from ..model.layout import CutModel, Layout
from ..system import manifest
from ..system.device import out_of_memory
from ..system.files import DRAFT, file_sha256, save_tensors, whole_folder
from ..system.provenance import describe_run
from ..system.terminal import console
from .run import Progress, from_dict, to_dict

MANIFEST = "checkpoint.json"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    path: Path
    manifest: dict[str, Any]

    @property
    def config(self) -> Config:
        with _reading(self, MANIFEST):
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


def tensors_in(where: Layout, state: Tensor, outer: bool) -> dict[str, State]:
    """File -> its tensors, as views of a central model's state."""
    weights, *moments = (where.views(row) for row in state[: len(state) - outer])
    files = {"model": weights}
    if moments:
        pairs = zip("mv", moments, strict=True)
        files["moments"] = {f"{kind}/{name}": t for kind, row in pairs for name, t in row.items()}
    return files | ({"outer": where.views(state[-1])} if outer else {})


def write_tensors(where: Layout, state: Tensor, outer: bool, draft: Path, part: str = "") -> None:
    """All files of a central model; `part` is the name of an owner's part."""
    for stem, tensors in tensors_in(where, state, outer).items():
        save_tensors(tensors, draft / f"{stem}{part}.safetensors")


def snapshot(central: Central) -> Callable[[Path], object]:
    """What writes the central model of now into a folder, whatever it will have become by then."""
    return partial(write_tensors, central.layout, central.copied(), central.outer)


def save(
    folder: Path,
    write: Callable[[Path], object],  # the central model's files into a folder
    progress: Progress,
    cfg: Config,
    model: Model,
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
        write(draft)
        parts = {p.name: huggingface.header(p) for p in draft.glob("model-*.safetensors")}
        if parts:  # as Hugging Face joins them
            where = {name: file for file, held in sorted(parts.items()) for name in held}
            index = json.dumps({"metadata": {}, "weight_map": where}, indent=1)
            (draft / "model.safetensors.index.json").write_text(index + "\n")
        hf_config = copy.deepcopy(model.config)
        hf_config.architectures = [type(model).__name__]
        hf_config.dtype = model.dtype
        hf_config.save_pretrained(draft)
        if tokenizer is not None and tokenizer.is_file():
            shutil.copyfile(tokenizer, draft / "tokenizer.json")
        files = {p.name: file_sha256(p) for p in sorted(draft.iterdir())}
        record = {
            "format": FORMAT,
            "config": config.to_dict(cfg),
            "tokenizer_sha256": files.get("tokenizer.json"),
            **to_dict(progress),
            **describe_run(),
            "files": files,
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
    model, train = cfg.model, cfg.train
    if model.weights != "random":  # a word, whatever folder may be called so
        model = replace(model, weights=weights_of(model.weights))
    if train.teacher not in ("none", "start", "cache"):
        train = replace(train, teacher=weights_of(train.teacher))
    return replace(cfg, model=model, train=train)


def verify(path: Path) -> Checkpoint:
    """Read the manifest and compare every file's sha256: a flipped byte is refused."""
    try:
        record = manifest.read_json(path / MANIFEST)
        version, _, _ = record["format"], dict(record["files"]), range(record["round"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no checkpoint: {MANIFEST} cannot be read ({error!r})"
        ) from None
    if version != FORMAT:
        raise ValueError(f"{path} has checkpoint format {version}; this twistlm reads {FORMAT}")
    manifest.check_folder(path, MANIFEST)
    return Checkpoint(path, record)


def template(checkpoint: Checkpoint) -> Model:
    model = huggingface.pretrained(str(checkpoint.path), dtype="auto").eval()
    model.name_or_path = model.config.name_or_path = ""  # it is a run's, whatever the round
    return model


def restore(checkpoint: Checkpoint, cut: CutModel) -> Central:
    """The central model as it was saved; `cut` is the checkpoint's `template`, in blocks."""
    carry, outer = (bool(_files(checkpoint, stem)) for stem in ("moments", "outer"))
    central = create(cut.segments, huggingface.state(cut.template), carry=carry, outer=outer)
    _, *rest = tensors_in(central.layout, central.state, outer).items()
    for stem, views in rest:
        saved: State = {}
        for file in _files(checkpoint, stem):
            try:
                saved |= load_file(checkpoint.path / file)
            except (SafetensorError, OSError) as error:
                said = f"checkpoint {checkpoint.path} is damaged: {file}: {error}"
                raise ValueError(said) from None
        with _reading(checkpoint, f"{stem}.safetensors"):
            for name, view in views.items():
                view.copy_(saved[name])
    return central


def progress_of(checkpoint: Checkpoint, block_map: BlockMap) -> Progress:
    """Where the run stood; an order of blocks that are cut otherwise now is left out."""
    with _reading(checkpoint, MANIFEST):
        leases = {"leases": stream.to_dict(checkpoint.leases)}
        found = from_dict(checkpoint.manifest | leases)
        order = found.order
        if any(sorted(order.get(g.name, ())) != list(range(g.n_blocks)) for g in block_map.groups):
            order = {}  # none, or one of blocks that are cut otherwise now
        return replace(found, order=order)


@contextmanager
def _reading(checkpoint: Checkpoint, name: str) -> Iterator[None]:
    """Let what makes no sense, though its hash is right, name its file."""
    try:
        yield
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if out_of_memory(error):
            raise
        where = checkpoint.path / name
        raise ValueError(f"{where} makes no sense: {huggingface.one_line(error)}") from None


def _files(checkpoint: Checkpoint, stem: str) -> list[str]:
    """Of one owner of everything, or of several."""
    pattern = rf"{stem}(-\d+-of-\d+)?\.safetensors"
    return [name for name in checkpoint.manifest["files"] if re.fullmatch(pattern, name)]


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

    def __init__(self, folder: Path, cfg: Config, model: Model, tokenizer: Path | None, n: int):
        self.folder, self.n_bytes = folder, n
        self.what = (cfg, model, tokenizer, cfg.run.keep)
        self.failure: str | None = None  # why the one before could not be written
        self._writing: Future[None] | None = None

    def save(self, snapshot: Callable[[], Callable[[Path], object]], progress: Progress) -> None:
        """Write a snapshot of the central model, which may change as soon as this returns."""
        self.wait()
        self.failure = None
        write = snapshot()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing = self._thread.submit(self._write, write, progress)
        self._thread.shutdown(wait=False)

    def wait(self) -> None:
        """Until nothing is in flight; a bug in the thread is raised here."""
        if self._writing is not None:
            self._thread.shutdown()  # it is over, with all that it held
            self._writing.result()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.wait()
        if self.failure and kind is None:
            raise OSError(self.failure)

    def _write(self, write: Callable[[Path], object], progress: Progress) -> None:
        try:
            save(self.folder, write, progress, *self.what)
        except OSError as error:
            free = "unknown"
            with suppress(OSError):
                free = f"{shutil.disk_usage(self.folder).free:,}"
            self.failure = (
                f"checkpoint {self.folder / folder_name(progress.round)} ({self.n_bytes:,} bytes, "
                f"{free} free) could not be written: {error}; older checkpoints are unharmed"
            )
            console.print(self.failure, style="yellow")

"""A parent: the full model that tickets are cut from, out of a checkpoint or any Hugging Face model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel

from .. import config
from ..config import Config, DataConfig, ModelConfig, Setting
from ..model import families, huggingface
from ..model.blocks import BlockMap
from ..model.central import Central, create
from ..system.device import pick_device
from ..training import checkpoint
from ..training.progress import Progress


@dataclass(frozen=True)
class Parent:
    """A full model in memory, with the config that says how it is cut and scaled."""

    source: str  # the folder, hub id or gguf:FILE it came from
    cfg: Config  # of its run; for other models the defaults, with the caller's overrides
    template: PreTrainedModel
    block_map: BlockMap
    central: Central
    tokenizer: Path | None  # a tokenizer.json
    tokenizer_sha256: str | None
    progress: Progress = field(default_factory=Progress)  # of its run, when it was saved

    @property
    def scale(self) -> str:
        """The activation scale of its subnets (`train.scale`)."""
        return self.cfg.train.scale


def what_is(source: str | Path) -> Literal["ticket", "checkpoint", "model"]:
    """A ticket folder, one of our runs or checkpoints, or else a model by Hugging Face's rules."""
    path = Path(source)
    if (path / "ticket.json").is_file():
        return "ticket"
    is_model = str(source).startswith("gguf:") or (path / "config.json").is_file()
    if (path / checkpoint.MANIFEST).is_file() or (path.exists() and not is_model):
        return "checkpoint"
    return "model"


def open_(source: str | Path, device: str = "auto", overrides: Sequence[str] = ()) -> Parent:
    """Open a run folder, a checkpoint, a Hugging Face folder or hub id, or gguf:FILE.

    `overrides` are `section.key=value`: `blocks.*` cuts the model otherwise than it was trained.
    """
    kind = what_is(source)
    if kind == "ticket":
        raise ValueError(
            f"{source} is a ticket, which is cut already: give the parent it came from"
        )
    if kind == "checkpoint":
        return _from_checkpoint(Path(source), device, overrides)
    return _from_hugging_face(str(source), device, overrides)


def recut(parent: Parent, setting: Setting) -> Parent:
    """The same weights cut in another setting; Adam's moments stay behind."""
    cfg = replace(parent.cfg, blocks=replace(parent.cfg.blocks, setting=setting))
    block_map = families.partition(parent.template, cfg.blocks)
    old = parent.central
    central = create(
        old.layout.views(old.weights), huggingface.shapes(parent.template), block_map,
        carry=False, outer=False, device=old.weights.device,
    )  # fmt: skip
    return replace(parent, cfg=cfg, block_map=block_map, central=central)


def _from_checkpoint(path: Path, device: str, overrides: Sequence[str]) -> Parent:
    found = checkpoint.open_(path)
    cfg = config.override(found.config, overrides)
    template = checkpoint.template(found)
    block_map = families.partition(template, cfg.blocks)
    central = checkpoint.restore(found, template, block_map, pick_device(device))
    tokenizer = found.path / "tokenizer.json"
    return Parent(
        str(found.path), cfg, template, block_map, central,
        tokenizer if tokenizer.is_file() else None, found.tokenizer_sha256,
        checkpoint.progress_of(found, block_map),
    )  # fmt: skip


def _from_hugging_face(source: str, device: str, overrides: Sequence[str]) -> Parent:
    if source.startswith("gguf:"):
        model = huggingface.from_gguf(huggingface.gguf_path(source))
    else:
        try:
            model = huggingface.from_folder_or_hub(source)
        except ValueError as error:
            raise ValueError(f"{source} is no valid checkpoint, and {error}") from None
    most = getattr(model.config, "max_position_embeddings", None) or 1024
    cfg = Config(
        model=ModelConfig(weights=source, type=model.config.model_type),
        data=replace(DataConfig(), train="", valid="", seq_len=min(1024, most)),
    )
    cfg = config.override(cfg, overrides)
    block_map = families.partition(model, cfg.blocks)
    central = create(
        huggingface.state(model), huggingface.shapes(model), block_map,
        carry=False, outer=False, device=pick_device(device),
    )  # fmt: skip
    tokenizer = Path(source) / "tokenizer.json"
    return Parent(
        source, cfg, model.eval(), block_map, central,
        tokenizer if tokenizer.is_file() else None, None,
    )  # fmt: skip

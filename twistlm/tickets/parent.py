"""A parent: the full model that tickets are cut from, of a run or any Hugging Face model."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import config
from ..compute.perplexity import Evaluator, Text
from ..config import ActivationScale, Config, DataConfig, ModelConfig, Setting
from ..model import families, huggingface
from ..model.blocks import BlockMap, State, Widths
from ..model.central import Central, create
from ..model.layout import cut_segments, layout
from ..model.subnet import Gates, Means, Subnet, build, scales
from ..system import manifest
from ..system.device import pick_device
from ..training import checkpoint
from ..training.run import Progress


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
    means: Means = field(default_factory=dict)  # of absent blocks: tickets' biases hold them

    def __repr__(self) -> str:
        cut, order = self.block_map, ", nested" if self.progress.order else ""
        blocks = ", ".join(f"{cut.n_blocks(kind)} {kind} blocks" for kind in cut.kinds)
        layers = f"{len(cut.layers)} layers"
        n_params = f"{self.central.layout.n_params:,} parameters"
        return f"Parent({self.source}: {n_params}, {blocks} in each of {layers}{order})"

    @property
    def scale(self) -> ActivationScale:
        """The activation scale of its subnets (`train.scale`)."""
        return self.cfg.train.scale

    def scales(self, widths: Widths) -> dict[str, float]:
        """The factor on each group's output in a subnet of these widths."""
        return scales(self.block_map, widths, self.scale, self.progress.rho)

    def whole(self, weights: Tensor | None = None, gates: Gates = "cut") -> Subnet:
        """The whole model over its own weights, or over others in the same layout."""
        mine = self.central.weights if weights is None else weights
        return build(self.template, self.block_map, self.central.layout, mine, gates=gates)

    def evaluator(self, text: Text) -> Evaluator:
        """Perplexities on a text, its own and those of its tickets, with its scale and means."""
        return Evaluator(
            self.template,
            self.block_map,
            self.central,
            text,
            scale=self.scale,
            precision=self.cfg.train.precision,
            rho=self.progress.rho,
            means=self.means,
        )


def what_is(source: str | Path) -> Literal["ticket", "checkpoint", "model"]:
    """A ticket folder, one of our runs or checkpoints, or else a model by Hugging Face's rules."""
    if not isinstance(source, str | Path):
        raise ValueError(f"a {type(source).__name__} is no folder, hub id or gguf:FILE")
    path = Path(source)
    if (path / "ticket.json").is_file():
        return "ticket"
    is_gguf = str(source).startswith("gguf:") or path.suffix == ".gguf"
    is_model = is_gguf or (path / "config.json").is_file()
    is_ours = (path / checkpoint.MANIFEST).is_file() or checkpoint.is_numbered(path)
    if is_ours or (path.exists() and not is_model):
        return "checkpoint"
    return "model"


def load(source: str | Path) -> tuple[str, PreTrainedModel, checkpoint.Checkpoint | None]:
    """A model that is no ticket: its name, itself, and its checkpoint where it is a run's."""
    name = str(source)
    if what_is(source) == "checkpoint":
        found = checkpoint.open_(source)
        return str(found.path), checkpoint.template(found), found
    try:
        return name, huggingface.pretrained(name), None
    except ValueError as error:
        if name.startswith("gguf:") or name.endswith(".gguf"):
            raise
        raise ValueError(f"{source} is no valid checkpoint, and {error}") from None


def open_parent(
    source: str | Path | PreTrainedModel, device: str = "auto", overrides: Sequence[str] = ()
) -> Parent:
    """Open a run folder, a checkpoint, a Hugging Face folder or hub id, gguf:FILE, or a model.

    `overrides` are `section.key=value`: `blocks.*` cuts the model otherwise than it was trained.
    """
    found, is_ticket = None, False
    if isinstance(source, PreTrainedModel):
        model = source if source.dtype == torch.float32 else copy.deepcopy(source).float()
        weights = source.config.name_or_path or ""  # where it comes from; "": nobody knows
        name = weights or f"a {type(model).__name__}"
    else:
        name = weights = str(source)
        if not (is_ticket := what_is(source) == "ticket"):
            name, model, found = load(source)
    # checkpoints of a healing have layers of different width, too
    if is_ticket or (found is None and getattr(model.config, "is_heterogeneous", False)):
        raise ValueError(f"{name} is a ticket, which is cut already: give the parent it came from")
    bare = Config(
        model=ModelConfig(weights=weights or "random", type=model.config.model_type),
        data=DataConfig(train="", valid="", seq_len=default_seq_len(model)),
    )
    cfg = config.override(found.config if found else bare, overrides)
    huggingface.check_positions(model, cfg.data.seq_len)
    block_map, tokenizer = families.partition(model, cfg.blocks), Path(name, "tokenizer.json")
    progress = checkpoint.progress_of(found, block_map) if found else Progress()
    return Parent(
        source=name,
        cfg=cfg,
        template=model.eval(),
        block_map=block_map,
        central=_central(huggingface.state(model), model, block_map, pick_device(device)),
        tokenizer=tokenizer if tokenizer.is_file() else None,
        tokenizer_sha256=found.manifest["tokenizer_sha256"] if found else None,
        progress=progress,
    )


def config_of(source: str | Path, overrides: Sequence[str] = ()) -> Config | None:
    """The config that a parent would be opened with, without reading its weights.

    None where nothing can be said: the source is a ticket, or no checkpoint can be read.
    """
    kind, path = what_is(source), Path(source)
    cfg = Config(data=DataConfig(train="", valid=""))
    if kind == "checkpoint":
        newest = [path, *checkpoint.numbered(path / "checkpoints")][-1]
        try:
            cfg = config.from_record(manifest.read_json(newest / checkpoint.MANIFEST)["config"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return None if kind == "ticket" else config.override(cfg, overrides)


def recut(parent: Parent, setting: Setting) -> Parent:
    """The same weights cut in another setting; Adam's moments stay behind."""
    cfg = replace(parent.cfg, blocks=replace(parent.cfg.blocks, setting=setting))
    block_map = families.partition(parent.template, cfg.blocks)
    old = parent.central
    state = old.layout.views(old.weights)
    central = _central(state, parent.template, block_map, old.weights.device)
    return replace(parent, cfg=cfg, block_map=block_map, central=central)


def _central(
    state: State, model: PreTrainedModel, block_map: BlockMap, device: torch.device
) -> Central:
    where = layout(block_map, huggingface.shapes(model))
    return create(cut_segments(where, block_map, device), state, carry=False, outer=False)


def default_seq_len(model: PreTrainedModel) -> int:
    """Of a model that is no run: 1024 tokens, or as many as it has positions."""
    return min(1024, huggingface.n_positions(model))

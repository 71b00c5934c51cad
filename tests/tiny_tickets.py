"""Tickets of the tiny models, with another width in every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from families_table import TABLE, build
from transformers import PreTrainedModel

from twistlm.model.blocks import Blueprint
from twistlm.tickets import deploy, parent
from twistlm.tickets.parent import Parent

N_FFN = 3  # blocks of 16 neurons
KEPT_FFN = ((0, 2), (0, 1, 2), (1,))  # by layer
KEPT_ATTN = ((1, 2), (0,), (0, 2))


def open_parent(
    name: str, attn_by: str, folder: Path, *words: str, **config: Any
) -> tuple[Parent, Blueprint]:
    """A parent on disk, opened as a user would, and the blueprint of an uneven ticket."""
    row = TABLE[name]
    build(row.type, row.config | config).save_pretrained(folder)
    cut = [f"blocks.attn_by={attn_by}", f"blocks.n_ffn={N_FFN}", "blocks.shared_first=0"]
    opened = parent.open_parent(folder, "cpu", [*cut, "blocks.shared_last=0", *words])
    kept = {"attn": KEPT_ATTN, "ffn": KEPT_FFN}
    return opened, {g.name: kept[g.kind][g.layer] for g in opened.block_map.groups}


def tiny_ticket(name: str, attn_by: str, folder: Path, **config: Any) -> PreTrainedModel:
    """The ticket as it is loaded from its own folder in `folder`; `config` changes the row's."""
    deploy.save_ticket(*open_parent(name, attn_by, folder, **config), folder / "ticket")
    return deploy.load_ticket(folder / "ticket")

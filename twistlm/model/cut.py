"""A model and how it is cut: what every seat, engine and shard is built from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..config import BlocksConfig
from . import families, huggingface
from .blocks import BlockMap
from .layout import Layout, Segments, cut_segments, layout


@dataclass(frozen=True)
class CutModel:
    """A Hugging Face model, its blocks, and where their parameters lie in one flat buffer."""

    template: PreTrainedModel
    block_map: BlockMap
    segments: Segments
    dtype: torch.dtype  # of weights and moments

    @property
    def full(self) -> Layout:
        """The layout of the whole model."""
        return self.segments.full

    @property
    def device(self) -> torch.device:
        return self.segments.block_of.device


def cut_model(
    template: PreTrainedModel, blocks: BlocksConfig, device: torch.device, dtype: torch.dtype
) -> CutModel:
    """Cut a model as `blocks` says."""
    block_map = families.partition(template, blocks)
    where = layout(block_map, huggingface.shapes(template))
    return CutModel(template, block_map, cut_segments(where, block_map, device), dtype)

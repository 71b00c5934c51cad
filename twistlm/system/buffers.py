"""Host memory that is used again in every round."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class BufferPool:
    """Buffers by name, used again and grown: the first touch of fresh memory costs more than its transfer."""

    kept: dict[str, Tensor] = field(default_factory=dict)

    def get(self, name: str, n_bytes: int) -> Tensor:
        """uint8 [n_bytes], with anything in it."""
        if name not in self.kept or self.kept[name].numel() < n_bytes:
            self.kept[name] = torch.empty(n_bytes, dtype=torch.uint8)
        return self.kept[name][:n_bytes]

"""Host memory that is used again in every round."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Rooms:
    """Buffers that are used again: the first touch of fresh memory costs more than its transfer."""

    kept: dict[str, Tensor] = field(default_factory=dict)

    def get(self, what: str, n_bytes: int) -> Tensor:
        """uint8 [n_bytes], with anything in it."""
        if what not in self.kept or self.kept[what].numel() < n_bytes:
            self.kept[what] = torch.empty(n_bytes, dtype=torch.uint8)
        return self.kept[what][:n_bytes]

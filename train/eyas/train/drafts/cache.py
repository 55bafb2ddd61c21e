"""Key and value cache of a one-layer draft while it decodes a single sequence."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


class DraftCache:
    """Keys and values [g, capacity, d], of which the first `length` entries are valid; capacity doubles on demand."""

    def __init__(
        self, num_heads: int, head_dim: int, *, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._store = torch.empty(2, num_heads, max(capacity, 1), head_dim, dtype=dtype, device=device)
        self.length = 0

    def append(
        self, keys: Float[Tensor, "n g d"], values: Float[Tensor, "n g d"]
    ) -> tuple[Float[Tensor, "g L d"], Float[Tensor, "g L d"]]:
        """Add n entries; returns views of all valid keys and values, which the next append may overwrite."""
        end = self.length + keys.shape[0]
        self._grow(end)
        self._store[0, :, self.length : end] = keys.detach().transpose(0, 1)
        self._store[1, :, self.length : end] = values.detach().transpose(0, 1)
        self.length = end
        return self._store[0, :, :end], self._store[1, :, :end]

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` entries; ValueError when there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll a cache of {self.length} entries back to {length}")
        self.length = length

    def _grow(self, needed: int) -> None:
        capacity = self._store.shape[2]
        if needed <= capacity:
            return
        grown = self._store.new_empty(2, self._store.shape[1], max(needed, 2 * capacity), self._store.shape[3])
        grown[:, :, : self.length] = self._store[:, :, : self.length]
        self._store = grown

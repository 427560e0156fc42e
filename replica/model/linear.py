"""A linear layer for inference whose weight may be laid out for the device it runs on.

It knows nothing of the model around it, and of layouts only that there are some.
"""

from __future__ import annotations

from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear` without initial values: the weight is there to be loaded."""

    packed: Tensor | None = None
    """The weight in the layout of the `LayerOps` that packed it; `weight` is gone then."""

    def reset_parameters(self) -> None:
        pass

    def replace_weight(self, packed: Tensor) -> None:
        """Lets go of the plain weight, which only lives on where it is shared."""
        self.packed = packed
        del self.weight

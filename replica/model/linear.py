"""A linear layer for inference, and the format that its weight lies in.

It knows nothing of the model around it, and of formats only what one has to do. A new one, such as
a quantised weight, is a class here or elsewhere that takes the place of the plain weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from replica.model.spec import Activation

Epilogue: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(x [T, inputs], product [T, outputs]) -> the product that the next operation reads; it may be the
same tensor, changed in place."""


def activated(gate_up: Tensor, activation: Activation) -> Tensor:
    """[T, 2C] to [T, C]: the first half through the activation, times the second half."""
    gate, up = gate_up.chunk(2, -1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active.mul_(up)


class Format(Protocol):
    """A weight as some device likes it, and how it is multiplied with. It has no bias in it."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[T, outputs]"""

    def gated(self, x: Tensor, activation: Activation) -> Tensor | None:
        """`activated` of the product, or None where this format has nothing better for it."""

    def logits(self, x: Tensor, out: Tensor) -> None:
        """The product into `out`, float32 [T, outputs]."""


class Linear(nn.Linear):
    """`nn.Linear` without initial values: the weight is there to be loaded."""

    bias: nn.Parameter | None  # type: ignore[assignment]  # torch forgets that there may be none
    format: Format | None = None
    """How the weight is stored; None for a plain `weight`. Otherwise `weight` is released, unless
    it is shared."""
    epilogue: Epilogue | None = None
    """Applied to each product before anybody reads it: an all-reduce of a row-parallel layer, or
    what an adapter adds. Not applied to logits."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(inputs, outputs, bias, device, dtype)

    def reset_parameters(self) -> None:
        pass

    def replace_weight(self, format: Format) -> None:  # noqa: A002
        """Lets go of the plain weight, which only lives on where it is shared."""
        self.format = format
        del self.weight

    def product(self, x: Tensor) -> Tensor:
        """[T, outputs] of x [T, inputs], by torch or by the weight's format."""
        if self.format is None:
            return self.finished(x, F.linear(x, self.weight, self.bias))
        return self.finished(x, self.format.product(x, self.bias))

    def finished(self, x: Tensor, product: Tensor) -> Tensor:
        """What the epilogue makes of [T, outputs]."""
        return product if self.epilogue is None else self.epilogue(x, product)

    @property
    def is_bare(self) -> bool:
        """Whether its product is the weight's and nothing else, so that it may be fused with what
        comes next."""
        return self.bias is None and self.epilogue is None

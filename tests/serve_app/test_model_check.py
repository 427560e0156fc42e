from __future__ import annotations

import json
from pathlib import Path

import pytest

from replica.config import EngineConfig
from serve_app.model_check import check_model
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

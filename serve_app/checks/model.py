"""Checks a model before Serve starts: a replica that cannot load it would restart for ever."""

from __future__ import annotations

from replica.config import EngineConfig
from replica.model.loading import check_files, load_spec, load_tokenizer
from serve_app.text.detokenizer import detokenizers
from serve_app.text.templates import templates_of


def check_model(engine: EngineConfig) -> None:
    """Reads configuration and tokenizer, and of weights what their files begin with. Raises
    ValueError with a sentence."""
    load_spec(engine.model, engine.revision)
    check_files(engine.model, engine.revision)
    tokenizer = load_tokenizer(engine.model, engine.revision)
    detokenizers(tokenizer.backend_tokenizer)
    templates_of(tokenizer)

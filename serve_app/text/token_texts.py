"""What single tokens read as, outside of any text: for log probabilities.

The module does not know where ids come from. The text of a sequence is not joined from these
(`serve_app.text.detokenizer` does that).
"""

from __future__ import annotations

from tokenizers import Tokenizer

from serve_app.text.detokenizer import token_bytes


class TokenTexts:
    """Texts of one tokenizer's tokens. Looked up tokens are remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = token_bytes(tokenizer)
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token_id: int) -> tuple[str, list[int]]:
        """(text, bytes). A token that is no valid UTF-8 by itself reads as "bytes:" and its bytes
        in hexadecimal, so that any two of them differ."""
        if token_id not in self._known:
            data = self._bytes_of(token_id)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._known[token_id] = text, list(data)
        return self._known[token_id]

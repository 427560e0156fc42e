"""The text of one sequence: what its tokens read as, up to where it ends.

The module knows neither requests nor who generates.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from replica.messages import FinishReason, TokenLogprobs
from serve_app.backend import EngineFailure
from serve_app.detokenizer import Detokenizer
from serve_app.logprobs import ToldToken
from serve_app.stop_strings import StopStrings

Ending: TypeAlias = Literal["stop", "length"]
"""The finish reasons that a client may see."""


class SequenceText:
    """Follows one sequence.

    A token that ended the sequence is shown only if `include_stop`, and then as the
    detokenizer shows it: not at all if it is special and special tokens are skipped. The
    first `min_tokens` tokens are no part of a stop string.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._spared = min_tokens if stops else 0
        """Tokens to come that no stop string may take from."""
        self._waiting: list[ToldToken] = []
        """Tokens whose text is not certain yet, if they are to be told."""
        self._read_chars = self._shown_chars = 0
        self._complete = False
        """All text is out, and no stop string has cut it."""

    def read(
        self,
        token_ids: tuple[int, ...],
        reason: FinishReason | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> tuple[str, Ending | None]:
        """The text that is certain now, and how it ends if it does.

        A stop string may end it before the sequence has ended. Raises EngineFailure for a
        reason that is no ending. logprobs: one per token, or none.
        """
        if reason is not None and reason not in ("stop", "length"):
            raise EngineFailure(f"the sequence ended by {reason}")
        if reason == "stop" and not self._include_stop:
            token_ids = token_ids[:-1]
        read = len(token_ids)
        spared = ""
        if self._spared:
            spared = self._push(token_ids[: self._spared], logprobs)
            token_ids, logprobs = token_ids[self._spared :], logprobs[self._spared :]
            self._spared = max(0, self._spared - read)
        text = self._push(token_ids, logprobs)
        if reason is not None:
            text += self._detokenizer.finish()
        text, ending = self._cut(text, reason)
        self._shown_chars += len(spared) + len(text)
        return spared + text, ending

    def take_tokens(self) -> tuple[ToldToken, ...]:
        """Tokens whose text has come out since the last call; at the end, all that no stop string
        has cut away."""
        tokens = self._waiting
        out = len(tokens)
        if not self._complete:
            out = sum(token.offset < self._shown_chars for token in tokens)
        self._waiting = tokens[out:]
        return tuple(tokens[:out])

    def _push(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> str:
        if not logprobs:
            return self._detokenizer.push(token_ids)
        pieces = []
        for token, told in zip(token_ids, logprobs, strict=False):
            self._waiting.append(ToldToken(token, self._read_chars, told))
            pieces.append(self._detokenizer.push((token,)))
            self._read_chars += len(pieces[-1])
        return "".join(pieces)

    def _cut(self, text: str, ending: Ending | None) -> tuple[str, Ending | None]:
        if self._stops is None:
            self._complete = ending is not None
            return text, ending
        text = self._stops.push(text)
        if self._stops.matched:
            return text, "stop"
        self._complete = ending is not None
        return (text, None) if ending is None else (text + self._stops.finish(), ending)

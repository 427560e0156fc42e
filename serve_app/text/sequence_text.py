"""The text of one sequence: what its tokens read as, up to where it ends.

The module knows neither requests nor who generates.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from replica.messages import FinishReason, TokenLogprobs
from serve_app.protocol.backend import EngineFailure
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.logprobs import ShownToken
from serve_app.text.stop_strings import StopStrings

Ending: TypeAlias = Literal["stop", "length"]
"""The finish reasons that a client may see."""


class SequenceText:
    """Turns the tokens of one sequence into its text.

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
        self._waiting: list[ShownToken] = []
        """Tokens whose text is not certain yet, if they are to be told."""
        self.tokens = 0
        """Read so far: those that ended the sequence or completed a stop string included, and
        nothing behind, however much of it had come already."""
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
        shown = len(token_ids) - (reason == "stop" and not self._include_stop)
        text = self._until_cut(token_ids[:shown], logprobs)
        if not self.is_cut:
            self.tokens += len(token_ids) - shown
            text += self._finish() if reason is not None else ""
        self._shown_chars += len(text)
        self._complete = reason is not None and not self.is_cut
        return text, "stop" if self.is_cut else reason

    @property
    def is_cut(self) -> bool:
        """A stop string has ended it."""
        return self._stops is not None and self._stops.matched

    def take_tokens(self) -> tuple[ShownToken, ...]:
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
            self._waiting.append(ShownToken(token, self._read_chars, told))
            pieces.append(self._detokenizer.push((token,)))
            self._read_chars += len(pieces[-1])
        return "".join(pieces)

    def _until_cut(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> str:
        """One token at a time where a stop string may end it: which one that is must not depend on
        how many come together."""
        if self._stops is None:
            self.tokens += len(token_ids)
            return self._push(token_ids, logprobs)
        pieces = []
        for place, token in enumerate(token_ids):
            text = self._push((token,), logprobs[place : place + 1])
            self.tokens += 1
            if self._spared:
                self._spared -= 1
            else:
                text = self._stops.push(text)
            pieces.append(text)
            if self._stops.matched:
                break
        return "".join(pieces)

    def _finish(self) -> str:
        text = self._detokenizer.finish()
        if self._stops is None:
            return text
        text = self._stops.push(text)
        return text if self._stops.matched else text + self._stops.finish()

"""The text of one sequence: what its tokens read as, up to where it ends.

The module knows neither requests nor who generates.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from replica.messages import FinishReason
from serve_app.backend import EngineFailure
from serve_app.detokenizer import Detokenizer
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

    def read(
        self, token_ids: tuple[int, ...], reason: FinishReason | None = None
    ) -> tuple[str, Ending | None]:
        """The text that is certain now, and how it ends if it does.

        A stop string may end it before the sequence has ended. Raises EngineFailure for a
        reason that is no ending.
        """
        if reason is not None and reason not in ("stop", "length"):
            raise EngineFailure(f"the sequence ended by {reason}")
        if reason == "stop" and not self._include_stop:
            token_ids = token_ids[:-1]
        spared = ""
        if self._spared:
            spared, token_ids = self._spare(token_ids)
        text = self._detokenizer.push(token_ids)
        if reason is not None:
            text += self._detokenizer.finish()
        if self._stops is None:
            return text, reason
        text, ending = self._cut(text, reason)
        return spared + text, ending

    def _spare(self, token_ids: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        text = self._detokenizer.push(token_ids[: self._spared])
        rest = token_ids[self._spared :]
        self._spared = max(0, self._spared - len(token_ids))
        return text, rest

    def _cut(self, text: str, ending: Ending | None) -> tuple[str, Ending | None]:
        assert self._stops is not None
        text = self._stops.push(text)
        if self._stops.matched:
            return text, "stop"
        return (text, None) if ending is None else (text + self._stops.finish(), ending)

from __future__ import annotations

import pytest

from serve_app.http.rate_headers import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.0001, "1ms"),
        (0.02, "20ms"),
        (0.9999, "1000ms"),
        (1.0, "1s"),
        (6.2, "7s"),
        (59.9, "1m0s"),
        (90, "1m30s"),
    ],
)
def test_durations_are_written_as_openai_does_and_never_too_short(seconds, text):
    assert duration(seconds) == text

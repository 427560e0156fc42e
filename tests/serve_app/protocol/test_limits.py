from __future__ import annotations

from dataclasses import fields

import pytest
from pydantic import TypeAdapter, ValidationError

from serve_app.protocol.limits import Limits


@pytest.mark.parametrize("name", [field.name for field in fields(Limits)])
def test_no_limit_is_negative(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: -1})


@pytest.mark.parametrize("temperature", [-0.1, 2.1, float("nan")])
def test_the_default_temperature_is_one_that_a_request_could_name(temperature: float) -> None:
    with pytest.raises(ValueError, match="default_temperature"):
        Limits(default_temperature=temperature)


def test_unknown_settings_are_errors() -> None:
    with pytest.raises(ValidationError, match="max_bodies"):
        TypeAdapter(Limits).validate_python({"max_bodies": 1})

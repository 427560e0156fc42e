"""`pytest tests/router --hypothesis-profile=thorough` runs 1,000 examples per property."""

from hypothesis import settings

settings.register_profile("thorough", max_examples=1000, stateful_step_count=100, deadline=None)

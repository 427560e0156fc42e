"""How a model is refused."""


class UnsupportedModel(ValueError):
    """A model that this engine cannot serve, and why, in one sentence."""

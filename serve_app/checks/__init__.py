"""Checks before a start: configuration, model, usage store."""

"""Streams, events, graphs and their times."""

"""Attention over the paged KV pool, on each kind of device."""

"""Triton kernels for the parts of a layer that are not attention, for steps with few tokens."""

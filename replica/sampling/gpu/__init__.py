"""Sampling in kernels."""

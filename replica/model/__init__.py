"""Weights, layers and attention: from a step's tokens to logits."""

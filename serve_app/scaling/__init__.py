"""How many replicas there should be."""

"""Which tokens the next step computes: pure CPU work on counts."""

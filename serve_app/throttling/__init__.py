"""Protects what comes before admission: refuses, charges, and shares out processor time."""

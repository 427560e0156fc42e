"""From an admitted request to a replica's engine and back."""

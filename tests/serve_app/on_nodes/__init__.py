"""The application on a Ray cluster of several nodes."""

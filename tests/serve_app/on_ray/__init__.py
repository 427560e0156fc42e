"""The application on a real Ray cluster, with the real engine and a tiny random model."""

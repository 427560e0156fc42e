"""What is looked at before a start."""

"""What operators see: metrics, and a record of each request."""

"""What tenants used, kept beyond the processes that count it."""

"""Who is served next, and where: tenants, fair queue, credits, ledger. Pure Python."""

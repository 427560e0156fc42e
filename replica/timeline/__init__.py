"""From what was kept of some steps to a timeline that Perfetto opens, and to shares. No torch."""

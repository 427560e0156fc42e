"""Commands that measure: `python -m benchmarks.NAME [options] [--json FILE]`."""

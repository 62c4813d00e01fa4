"""Compare-and-swap registers with a clock: memory, SQL databases, Redis."""

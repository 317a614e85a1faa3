"""Room of pserver/checkpoint."""

"""Room of pserver/launcher."""

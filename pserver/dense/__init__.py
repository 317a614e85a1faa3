"""Room of pserver/dense."""

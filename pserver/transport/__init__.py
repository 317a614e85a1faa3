"""Room of pserver/transport."""

"""Room of pserver/table."""

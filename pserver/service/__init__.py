"""Room of pserver/service."""

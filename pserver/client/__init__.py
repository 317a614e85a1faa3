"""Room of pserver/client."""

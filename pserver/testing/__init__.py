"""Room of pserver/testing."""

"""Room of pserver/job."""

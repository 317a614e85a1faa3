"""Room of trainer/job."""

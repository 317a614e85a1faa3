"""Room of trainer/checkpoint."""

"""Room of trainer/collective."""

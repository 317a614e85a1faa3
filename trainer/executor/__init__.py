"""Room of trainer/executor."""

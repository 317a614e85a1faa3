"""Room of trainer/embedding."""

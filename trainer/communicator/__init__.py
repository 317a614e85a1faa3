"""Room of trainer/communicator."""

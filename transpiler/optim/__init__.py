"""Room of transpiler/optim."""

"""Room of transpiler/verify."""

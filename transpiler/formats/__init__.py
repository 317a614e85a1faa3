"""Room of transpiler/formats."""

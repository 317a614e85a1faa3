"""Room of transpiler/strategy."""

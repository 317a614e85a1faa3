"""Room of transpiler/passes."""

"""Room of transpiler/plan."""

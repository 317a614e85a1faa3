"""Room of transpiler/ir."""

"""Room of transpiler/tracing."""

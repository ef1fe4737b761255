"""HTTP in and out: one module per protocol."""

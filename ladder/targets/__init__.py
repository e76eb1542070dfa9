"""What can stand on the ladder: one module per target, each with `climb_cell`."""

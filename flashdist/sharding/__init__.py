"""Which part of a parameter this rank keeps and steps, and how its state is placed like the parameter."""

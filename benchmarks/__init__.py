"""Benchmarks of flashdist: one registry of inputs, one registry of optimizers, one way to measure."""

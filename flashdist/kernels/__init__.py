"""The step of a whole optimizer as few kernel calls: an eager backend in pure torch and a Triton backend for GPUs."""

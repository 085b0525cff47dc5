"""Checkpoints of others into flashdist's, and flashdist's into theirs, one tensor at a time."""

from flashdist.convert.run import SOURCES, TARGETS, convert

__all__ = ["SOURCES", "TARGETS", "convert"]

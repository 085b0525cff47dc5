"""Tests of flashdist; the folders mirror the package, `support` holds what they share."""

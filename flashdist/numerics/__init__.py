"""The mathematics of flashdist in pure torch; every kernel is checked against these functions."""

"""State on its way out of flashdist and back in."""

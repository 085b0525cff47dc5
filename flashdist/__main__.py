"""``python -m flashdist``: the same as the ``flashdist`` command."""

from flashdist.cli import main

main()

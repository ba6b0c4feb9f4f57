"""`python -m kvtier.appliance.cli`: the command line without an installed script."""

from . import main

main()

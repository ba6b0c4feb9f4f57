"""`python -m kvtier`: runs the command line, as the program `kvtier` does."""

from .appliance.cli import main

if __name__ == "__main__":
    main()

"""`python -m hopwell`: the command line."""

from .interface.cli import main

main(prog_name="python -m hopwell")

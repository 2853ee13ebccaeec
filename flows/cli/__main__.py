"""`python -m flows.cli` is `pypto-deploy`."""

from flows.cli.app import main

main()

"""The command line: `effasr COMMAND`, also ``python -m effasr.cli``."""

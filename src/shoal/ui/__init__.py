"""The command line and the live table."""

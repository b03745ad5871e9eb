"""The two rings of a directory have no names for Python."""

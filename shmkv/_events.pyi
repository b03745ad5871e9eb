"""Words that say "look again" have no names for Python."""

"""The crash matrix: real processes that die or stop at a named point of a call."""

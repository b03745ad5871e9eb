"""Engines that know nothing of shmkv, and what makes them use it. A package for each; none is imported by the library itself."""

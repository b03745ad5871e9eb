"""`shmkv run` puts this folder on PYTHONPATH, so that every Python that the program starts finds the names, too."""

"""The demo: a corpus of real text, and the command line on it."""

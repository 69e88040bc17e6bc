"""Other loaders, each in a file and an environment of its own, measured through the protocol of `protocol.py`."""

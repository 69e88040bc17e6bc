"""Images: what their headers say, how a model cuts them into patches, and their pixels."""

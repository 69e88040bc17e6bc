"""One run: compiled from its description, streamed, saved and accounted for."""

"""The engine: lanes at work, in order, on threads or in the calling thread."""

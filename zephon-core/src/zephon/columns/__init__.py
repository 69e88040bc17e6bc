"""What travels through the engine: columns of rows, tokens and records, and why a row is missing."""

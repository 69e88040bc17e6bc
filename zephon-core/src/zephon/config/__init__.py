"""What a run is told: the data recipe, options and topology."""

"""The curriculum: which rows every lane reads, in which order, as pure functions of recipe, seed and catalogs."""

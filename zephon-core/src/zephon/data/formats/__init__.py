"""File formats: how the bytes of one file become groups of rows. `base` holds the contract, `registry` the list."""

"""Search spaces and tile families, one module per operator family and instruction set."""

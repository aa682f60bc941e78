"""Tables of the docs and reports, made from committed results."""

"""Options of a class: their names, types, signatures, and its construction."""

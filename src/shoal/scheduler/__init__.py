"""Which trial goes where, and which program advances. Pure."""

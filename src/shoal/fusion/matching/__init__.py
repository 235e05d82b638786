"""Which trials may be one array: signatures, and the first difference in words."""

"""What trials and arrays cost, and whether a cut is exact: tried before anything trains."""

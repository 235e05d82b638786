"""From measures to a plan: which technique, how many shards, and why. Pure."""

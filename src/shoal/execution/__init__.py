"""A planned study while it runs: leases out, events in, until it ends or is stopped."""

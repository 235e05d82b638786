"""Who is on a device: trials that arrive, stay, are parked, and those that share a desk."""

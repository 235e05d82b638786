"""shoal trains many models at once, each possibly larger than the device, exactly as alone."""

"""The worker process: devices, programs and trials in motion."""

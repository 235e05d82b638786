"""Models and data for a first try: ordinary PyTorch that knows nothing of shoal."""

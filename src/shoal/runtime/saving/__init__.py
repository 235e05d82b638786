"""What of a trial goes into a generation, and back."""

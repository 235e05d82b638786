"""What survives a crash: files, tensors as bytes, and the generations of a trial. No torch."""

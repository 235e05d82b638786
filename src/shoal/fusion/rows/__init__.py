"""Parameters, buffers and numbers of N trials as N rows, and the way from one to all."""

"""Kernels of torch, called and chosen so that bits stay, and what stands beside them."""

"""The shared vocabulary: types and pure helpers that import no torch."""

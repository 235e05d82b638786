"""Search spaces and the samplers that need no other library."""

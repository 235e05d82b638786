"""Who holds which bytes on which tier, and the flat host store."""

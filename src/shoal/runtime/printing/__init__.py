"""What trials print, and where it goes."""

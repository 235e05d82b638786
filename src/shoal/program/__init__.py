"""Programs: actions, their text form, the checker and the replay. Pure."""

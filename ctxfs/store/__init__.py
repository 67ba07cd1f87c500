"""The one door for everybody."""

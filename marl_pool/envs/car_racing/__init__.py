"""CarRacing on image patches."""

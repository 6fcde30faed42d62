"""Episodes rendered to video."""

"""Tasks, data, figures and published numbers: one paper a package."""

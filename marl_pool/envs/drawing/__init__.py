"""Drawing shared by the environments' renderers."""

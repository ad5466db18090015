"""Between steps: what is recorded, saved and decided."""

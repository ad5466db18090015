"""After the run: what a person keeps. Nothing here needs torch."""

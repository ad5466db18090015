"""The command line: one file a verb; :mod:`.main` puts them together."""

"""Data in and out: other stores' folders, files for other tools, and parts of a dataset as datasets of their own."""

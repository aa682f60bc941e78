"""One module for each paper: its headline numbers, and what this package gives on the same work."""

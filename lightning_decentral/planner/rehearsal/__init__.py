"""Trains n workers in one process."""

"""Faults that are injected into real runs, and what becomes of the others."""

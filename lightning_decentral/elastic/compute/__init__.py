"""Reductions over the members, and the check that all members ask for the same reduction.

Public: none."""

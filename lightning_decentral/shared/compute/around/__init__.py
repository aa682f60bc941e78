"""Surroundings of a call of somebody else's code: a thread's modes, what a second run finds, functions of libraries.

Public: nothing.
"""

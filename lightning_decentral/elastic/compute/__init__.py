"""Reductions over the members that take part, and how members find out that one of them asks for another reduction.

Public: none.
"""

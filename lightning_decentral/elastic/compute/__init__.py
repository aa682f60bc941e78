"""Reductions over whoever takes part, and how members find out that one of them asks for another reduction.

Public: none.
"""

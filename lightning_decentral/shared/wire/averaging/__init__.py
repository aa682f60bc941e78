"""Gradient averages over devices that share them, and what codes round away of them.

Nothing here is public.
"""

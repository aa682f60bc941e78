"""Gradient averages over devices that share them, what codes round away of them, replicas that stay equal.

Nothing here is public.
"""

"""Connections of elastic workers: frames of JSON and bytes, a port that lets guests in, and the mesh between members.

Public: none.
"""

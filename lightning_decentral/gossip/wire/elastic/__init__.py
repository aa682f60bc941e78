"""Gossip's rounds where workers die and join while others train: over the views of `shared/wire/elastic`.

Public: none yet; no strategy uses it.
"""

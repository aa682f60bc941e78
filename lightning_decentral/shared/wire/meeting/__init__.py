"""Workers meet, report to each other that they live and why they end, and agree where all stop: by the store alone.

Public names: none; strategies use it by `shared/meeting.py`.
"""

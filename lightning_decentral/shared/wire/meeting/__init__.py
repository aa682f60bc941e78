"""Workers meet, tell each other that they live and why they end, and agree where all stop: through the store alone.

Public names: none; strategies use it by `shared/meeting.py`.
"""

"""Planning that all methods share, without torch: the discrete-event timeline, forecasts, the measured profile.

Public: `profile` (the profile's file), `timeline` and `forecast`.
"""

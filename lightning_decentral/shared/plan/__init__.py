"""What all methods' plans are made of, without torch: the discrete-event timeline, forecasts, the measured profile.

Public: `profile` (the file), `timeline` and `forecast`.
"""

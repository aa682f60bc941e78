"""Parts of all methods' plans, without torch: the discrete-event timeline, forecasts, the measured profile.

Public: `profile` (the file), `timeline` and `forecast`.
"""

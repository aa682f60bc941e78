"""Planning code of all methods, without torch: discrete-event timeline, forecasts, the measured profile.

Public: `profile` (the profile's file), `timeline` and `forecast`."""

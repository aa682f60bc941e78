"""Forecasts of compressed averages: seconds and bytes of a step, as values without torch.

Public: nothing here; `compressed` exports `forecast`, for the planner."""

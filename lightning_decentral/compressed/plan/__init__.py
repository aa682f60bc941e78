"""Plans of compressed averages: what a step will take, as values without torch.

Public: nothing here; `forecast` serves the planner, and stands in the face of `compressed`.
"""

"""Plans of partial backpropagation as plain values, without torch: depths, their order, costs, forecasts.

Public: `depth`, `depth_order`, `selection` and `cost`; `forecast` serves the planner.
"""

"""Plans of partial backpropagation as plain values, without torch: depths, their order, freezing, costs, forecasts.

Public: `depth`, `depth_order`, `freezing` and `cost`; `forecast` serves the planner.
"""

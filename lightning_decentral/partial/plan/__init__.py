"""Plans of partial backpropagation as plain values, without torch: depths, costs, forecasts.

Public: `depth`, `selection` and `cost`; `forecast` serves the planner."""

"""Plans of gossip as values, without torch: topologies, mixing matrices, stability, network traffic, forecasts.

Public: `topology` (see its own list), `weights` (mixing matrices and their spectral gap), `stability` (the largest
stable mixing rate for a delay) and `forecast`. The modules `checks`, `planned_traffic` and `step_costs` are internal.
"""

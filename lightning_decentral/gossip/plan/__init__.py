"""Plans of gossip as values, without torch: topologies, mixing matrices, stability, network traffic, forecasts.

Public: `topology` (a face of its own), `weights` (mixing matrices and their spectral gap), `stability` (the largest
rate a delay bears) and `forecast`. `checks`, `planned_traffic` and `step_costs` serve those.
"""

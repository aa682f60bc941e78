"""Arithmetic of the planner, without torch: placement of ranks on hosts, groups to measure, cost of Muon.

Public: `placement` and `host_links`."""

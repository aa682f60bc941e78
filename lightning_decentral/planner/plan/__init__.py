"""What the planner decides by arithmetic alone, without torch: placement on hosts, which links to measure.

Public: `placement` and `host_links`.
"""

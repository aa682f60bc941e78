"""Parts of the planner that are arithmetic alone, without torch: placement on hosts, which links to measure.

Public: `placement` and `host_links`.
"""

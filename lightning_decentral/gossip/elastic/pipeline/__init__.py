"""Elastic pipelines: whole pipelines that come and go (`pipelines`), and the stages of one (`stages`).

Public: none; `GossipReplicas(elastic=...)` makes them.
"""

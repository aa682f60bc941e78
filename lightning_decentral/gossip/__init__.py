"""Decentralized data-parallel training by gossip.

plan: `topology`, `weights`, `cliques`; rule: `combine`; wire: `exchange`, `verdict`, `mixer`; all workers in one
process: `simulation`; binding: `strategy`.
"""

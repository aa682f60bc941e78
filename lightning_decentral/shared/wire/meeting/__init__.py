"""Coordination through the key-value store: rendezvous, heartbeats, reasons of endings, agreement where all stop.

Public names: none; strategies use these modules by `shared/meeting.py`.
"""

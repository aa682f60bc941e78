"""Coordination through torch's key-value store: rendezvous, heartbeats, reasons why workers ended, agreed stops.

Public names: none; strategies use these modules by `shared/meeting.py`."""
